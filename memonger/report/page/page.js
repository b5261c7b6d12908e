"use strict";

// The page of `memonger report`. Data come as compressed JSON; names in them are only ever put into text nodes and onto
// the canvas, so that none is read as HTML. Nothing is loaded from anywhere.

/* ---------------------------------------------------------------- small helpers */

const byId = (id) => document.getElementById(id);

/** An element with properties and children; texts become text nodes. */
function make(tag, properties = {}, ...children) {
  const element = document.createElement(tag);
  for (const [key, value] of Object.entries(properties)) {
    if (key === "width") element.style.width = value;
    else element[key] = value;
  }
  element.append(...children);
  return element;
}

function drawn(tag, attributes, ...children) {
  const element = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  element.append(...children);
  return element;
}

const UNITS = ["B", "KiB", "MiB", "GiB", "TiB"];

/** A size for people, three digits or so. */
function size(bytes) {
  let power = 0;
  let amount = bytes;
  while (Math.abs(amount) >= 1024 && power < UNITS.length - 1) {
    amount /= 1024;
    power += 1;
  }
  return `${power === 0 || amount >= 100 ? amount.toFixed(0) : amount.toPrecision(3)} ${UNITS[power]}`;
}

const inFull = (bytes) => (bytes < 1024 ? `${bytes} bytes` : `${size(bytes)} (${bytes.toLocaleString("en")} bytes)`);
const percent = (part, digits = 1) => `${part < 0 ? "−" : "+"}${Math.abs(100 * part).toFixed(digits)} %`;
const clamp = (value, low, high) => Math.min(Math.max(value, low), high);

/** Sizes for an axis, all in one unit, with as many digits as tell neighbours apart. */
function sizesOf(values) {
  const most = values[values.length - 1] || 0;
  const power = clamp(Math.floor(Math.log2(Math.max(most, 1)) / 10), 0, 4);
  const step = (values[1] - values[0] || most) / 1024 ** power;
  const digits = step >= 1 || !step ? 0 : clamp(Math.ceil(-Math.log10(step)) + 1, 1, 9);
  return values.map((value) => `${(value / 1024 ** power).toFixed(digits)} ${UNITS[power]}`);
}

/** Round numbers from low to high, about `count` of them; sizes are round in powers of two. */
function ticks(low, high, count, binary) {
  const rough = (high - low) / count || 1;
  const base = binary ? 2 ** Math.floor(Math.log2(rough)) : 10 ** Math.floor(Math.log10(rough));
  const step = (binary ? [1, 2] : [1, 2, 5, 10]).map((factor) => base * factor).find((each) => each >= rough) || base;
  const found = [];
  for (let at = Math.ceil(low / step); at * step <= high; at++) found.push(at * step);
  return found;
}

async function unpack() {
  const bytes = Uint8Array.from(atob(byId("data").textContent), (sign) => sign.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
  return new Response(stream).json();
}

/* ---------------------------------------------------------------- the data */

/** The rectangles as typed arrays, with what is asked of them: names, blocks for culling, live bytes. */
class Rectangles {
  constructor(data) {
    const { rectangles: columns, steps, kinds } = data;
    this.count = columns.kind.length;
    this.kinds = kinds.map((kind) => kind.name);
    this.steps = steps;
    this.columns = columns;
    this.kind = Uint8Array.from(columns.kind);
    this.start = Float64Array.from(columns.start);
    this.stop = Float64Array.from(columns.stop);
    this.offset = Float64Array.from(columns.offset);
    this.bytes = Float64Array.from(columns.bytes);
    this.stepCount = steps.node.length;
    this.blocks = this.boundingBlocks(64);
    this.live = this.liveBytes();
    this.peakStep = this.live.reduce((best, value, step) => (value > this.live[best] ? step : best), 0);
    this.texts = null;
  }

  kindOf(index) {
    return this.kinds[this.kind[index]];
  }

  isInArena(index) {
    return !["workspace", "input", "weight"].includes(this.kindOf(index));
  }

  hasStep(index) {
    return !["input", "weight"].includes(this.kindOf(index));
  }

  name(index) {
    return this.columns.name[index] || this.steps.node[this.start[index]];
  }

  module(index) {
    return this.hasStep(index) ? this.steps.modules[this.steps.module[this.start[index]]] : this.name(index).split(/[./]/);
  }

  operator(index) {
    return this.hasStep(index) ? this.steps.operators[this.steps.operator[this.start[index]]] : "";
  }

  shape(index) {
    return this.columns.shapes[this.columns.shape[index]];
  }

  /** Consecutive rectangles, which begin at about one step, with the box around them: what is out of sight is skipped. */
  boundingBlocks(length) {
    const blocks = [];
    for (let first = 0; first < this.count; first += length) {
      const block = { first, end: Math.min(first + length, this.count), x0: Infinity, x1: 0, y0: Infinity, y1: 0 };
      for (let i = first; i < block.end; i++) {
        block.x0 = Math.min(block.x0, this.start[i]);
        block.x1 = Math.max(block.x1, this.stop[i]);
        block.y0 = Math.min(block.y0, this.offset[i]);
        block.y1 = Math.max(block.y1, this.offset[i] + this.bytes[i]);
      }
      blocks.push(block);
    }
    return blocks;
  }

  liveBytes() {
    const live = new Float64Array(this.stepCount + 1);
    for (let i = 0; i < this.count; i++) {
      if (!this.isInArena(i)) continue;
      live[this.start[i]] += this.bytes[i];
      live[this.stop[i]] -= this.bytes[i];
    }
    for (let step = 1; step <= this.stepCount; step++) live[step] += live[step - 1];
    return live.subarray(0, this.stepCount);
  }

  /** What the search looks in: name, node, operator, module and the names that share the place, in lower case. */
  searchTexts() {
    if (!this.texts) {
      this.texts = Array.from({ length: this.count }, (_, i) => {
        const others = (this.columns.others[i] || []).slice(1);
        const node = this.hasStep(i) ? this.steps.node[this.start[i]] : "";
        return [this.name(i), node, this.operator(i), this.module(i).join("/"), ...others].join("\n").toLowerCase();
      });
    }
    return this.texts;
  }

  find(words) {
    const wanted = words.toLowerCase().split(/\s+/).filter(Boolean);
    if (!wanted.length) return [];
    const found = [];
    this.searchTexts().forEach((text, i) => {
      if (wanted.every((word) => text.includes(word))) found.push(i);
    });
    return found;
  }

  /** The rectangle at a point, or -1. */
  at(x, y) {
    for (const block of this.blocks) {
      if (x < block.x0 || x >= block.x1 || y < block.y0 || y >= block.y1) continue;
      for (let i = block.first; i < block.end; i++) {
        const inside = x >= this.start[i] && x < this.stop[i] && y >= this.offset[i] && y < this.offset[i] + this.bytes[i];
        if (inside) return i;
      }
    }
    return -1;
  }
}

/* ---------------------------------------------------------------- the map */

const GUTTER = 76; // pixels for the sizes at the left
const FOOT = 96; // for the steps and the curve below
const CURVE = 66;

/** The canvas: what is in sight, drawn pixel by pixel. Rectangles don't overlap, so a frame costs about its pixels. */
class ArenaMap {
  constructor(canvas, rectangles, plan, onSelect, onStep) {
    Object.assign(this, { canvas, rectangles, plan, onSelect, onStep });
    this.selected = -1;
    this.hovered = -1;
    this.hits = [];
    this.isHit = null;
    this.step = rectangles.peakStep;
    this.planned = false;
    this.paints = new Uint32Array(0);
    this.listen();
    this.recolour();
    this.fit();
    new ResizeObserver(() => this.redraw()).observe(canvas);
  }

  /* -- what is in sight */

  fit() {
    const arena = this.plan.arena_bytes + (this.plan.workspace_bytes || 0);
    this.view = { x0: 0, x1: this.rectangles.stepCount, y0: 0, y1: Math.max(arena, 1) };
    this.redraw();
  }

  showAll() {
    this.view = { x0: 0, x1: this.rectangles.stepCount, y0: 0, y1: Math.max(this.plan.total_bytes, 1) };
    this.redraw();
  }

  zoom(factor, x, y, onlySteps = false) {
    const view = this.view;
    const centreX = x ?? (view.x0 + view.x1) / 2;
    const centreY = y ?? (view.y0 + view.y1) / 2;
    const width = clamp((view.x1 - view.x0) * factor, 3, this.rectangles.stepCount * 1.2 + 3);
    const height = onlySteps ? view.y1 - view.y0 : clamp((view.y1 - view.y0) * factor, 64, this.plan.total_bytes * 1.2 + 64);
    const partX = (centreX - view.x0) / (view.x1 - view.x0);
    const partY = (centreY - view.y0) / (view.y1 - view.y0);
    this.look(centreX - partX * width, centreY - partY * height, width, height);
  }

  pan(partX, partY) {
    const { x0, x1, y0, y1 } = this.view;
    this.look(x0 + partX * (x1 - x0), y0 + partY * (y1 - y0), x1 - x0, y1 - y0);
  }

  /** Look at a place; most of what is in sight stays within the plan. */
  look(x, y, width, height) {
    const left = clamp(x, Math.min(0, this.rectangles.stepCount - width) - 0.1 * width, this.rectangles.stepCount - 0.1 * width);
    const low = clamp(y, -0.1 * height, Math.max(this.plan.total_bytes - 0.1 * height, 0));
    this.view = { x0: left, x1: left + width, y0: low, y1: low + height };
    this.redraw();
  }

  /** Bring a rectangle into sight; nothing moves if it is large enough there already. */
  show(index) {
    const r = this.rectangles;
    const view = this.view;
    const width = r.stop[index] - r.start[index];
    const inside = r.start[index] >= view.x0 && r.stop[index] <= view.x1 && r.offset[index] >= view.y0 && r.offset[index] + r.bytes[index] <= view.y1;
    const large = width / (view.x1 - view.x0) > 0.005 && r.bytes[index] / (view.y1 - view.y0) > 0.005;
    if (inside && large) return;
    const spanX = Math.max(width * 6, 40);
    const spanY = Math.max(r.bytes[index] * 6, 1024);
    this.look(r.start[index] + width / 2 - spanX / 2, r.offset[index] + r.bytes[index] / 2 - spanY / 2, spanX, spanY);
  }

  select(index) {
    this.selected = index;
    if (index >= 0 && this.rectangles.hasStep(index)) this.step = this.rectangles.start[index];
    this.onSelect(index);
    this.redraw();
  }

  /** Mark what a search found: the rest is drawn pale. */
  mark(hits) {
    this.hits = hits;
    this.isHit = hits.length ? new Uint8Array(this.rectangles.count) : null;
    for (const index of hits) this.isHit[index] = 1;
    this.redraw();
  }

  /* -- drawing */

  recolour() {
    const style = getComputedStyle(document.documentElement);
    const read = (name) => style.getPropertyValue(`--${name}`).trim();
    this.colour = Object.fromEntries(["page", "ink", "faint", "line", "mark", "kept", "shared", "recomputed", "accent"].map((name) => [name, read(name)]));
    const page = rgb(this.colour.page);
    this.background = packed(page);
    this.shades = this.rectangles.kinds.map((name) => {
      const full = rgb(read(name));
      return [1, 0.86, 0.74].map((part) => packed(mixed(full, page, part)));
    });
    this.inks = this.rectangles.kinds.map((name) => (brightness(rgb(read(name))) > 110 ? "#000" : "#fff"));
    this.pale = this.rectangles.kinds.map((name) => packed(mixed(rgb(read(name)), page, 0.16)));
    this.redraw();
  }

  redraw() {
    if (this.planned) return;
    this.planned = true;
    requestAnimationFrame(() => {
      this.planned = false;
      this.draw();
    });
  }

  draw() {
    const scale = window.devicePixelRatio || 1;
    const box = this.canvas.getBoundingClientRect();
    const width = Math.max(1, Math.round(box.width * scale));
    const height = Math.max(1, Math.round(box.height * scale));
    if (this.canvas.width !== width || this.canvas.height !== height) {
      this.canvas.width = width;
      this.canvas.height = height;
    }
    this.scale = scale;
    this.plot = { left: Math.round(GUTTER * scale), width: width - Math.round(GUTTER * scale), height: height - Math.round(FOOT * scale) };
    if (this.plot.width < 20 || this.plot.height < 20) return;
    const context = this.canvas.getContext("2d", { alpha: false });
    context.fillStyle = this.colour.page;
    context.fillRect(0, 0, width, height);
    const large = this.paint(context);
    this.drawLabels(context, large);
    this.drawMarks(context);
    this.drawAxes(context);
    this.drawCurve(context);
  }

  x(step) {
    return ((step - this.view.x0) / (this.view.x1 - this.view.x0)) * this.plot.width;
  }

  y(bytes) {
    return this.plot.height - ((bytes - this.view.y0) / (this.view.y1 - this.view.y0)) * this.plot.height;
  }

  /** Fill the pixels of all rectangles in sight; returns those that are large enough for a name. */
  paint(context) {
    const { width, height } = this.plot;
    const r = this.rectangles;
    const { x0, x1, y0, y1 } = this.view;
    if (this.paints.length !== width * height) {
      this.image = context.createImageData(width, height);
      this.paints = new Uint32Array(this.image.data.buffer);
    }
    const pixels = this.paints.fill(this.background);
    const scaleX = width / (x1 - x0);
    const scaleY = height / (y1 - y0);
    const large = [];
    for (const block of r.blocks) {
      if (block.x1 <= x0 || block.x0 >= x1 || block.y1 <= y0 || block.y0 >= y1) continue;
      for (let i = block.first; i < block.end; i++) {
        let left = Math.round((r.start[i] - x0) * scaleX);
        let right = Math.max(left + 1, Math.round((r.stop[i] - x0) * scaleX));
        let top = height - Math.round((r.offset[i] + r.bytes[i] - y0) * scaleY);
        let bottom = Math.max(top + 1, height - Math.round((r.offset[i] - y0) * scaleY));
        if (right <= 0 || left >= width || bottom <= 0 || top >= height) continue;
        if (right - left > 3) right -= 1; // a line between neighbours
        if (bottom - top > 3) top += 1;
        if (right - left > 60 * this.scale && bottom - top > 13 * this.scale) large.push(i);
        left = Math.max(left, 0);
        right = Math.min(right, width);
        top = Math.max(top, 0);
        bottom = Math.min(bottom, height);
        const colour = this.isHit && !this.isHit[i] ? this.pale[r.kind[i]] : this.shades[r.kind[i]][i % 3];
        for (let row = top * width; row < bottom * width; row += width) {
          if (right - left > 8) pixels.fill(colour, row + left, row + right);
          else for (let at = row + left; at < row + right; at++) pixels[at] = colour;
        }
      }
    }
    context.putImageData(this.image, this.plot.left, 0);
    return large;
  }

  clipped(context, draw) {
    context.save();
    context.beginPath();
    context.rect(this.plot.left, 0, this.plot.width, this.plot.height);
    context.clip();
    context.translate(this.plot.left, 0);
    draw();
    context.restore();
  }

  drawLabels(context, large) {
    const r = this.rectangles;
    this.clipped(context, () => {
      context.font = `${11 * this.scale}px system-ui, sans-serif`;
      context.textBaseline = "middle";
      for (const i of large.slice(0, 400)) {
        const left = Math.max(this.x(r.start[i]), 0);
        const right = Math.min(this.x(r.stop[i]), this.plot.width);
        const signs = Math.floor((right - left - 8 * this.scale) / (6 * this.scale));
        if (signs < 5) continue;
        const name = r.name(i);
        const text = name.length > signs ? `${name.slice(0, signs - 1)}…` : name;
        const middle = (clamp(this.y(r.offset[i]), 0, this.plot.height) + clamp(this.y(r.offset[i] + r.bytes[i]), 0, this.plot.height)) / 2;
        context.fillStyle = this.isHit && !this.isHit[i] ? this.colour.faint : this.inks[r.kind[i]];
        context.fillText(text, left + 4 * this.scale, middle);
      }
    });
  }

  outline(context, index, colour, width) {
    const r = this.rectangles;
    const left = this.x(r.start[index]);
    const top = this.y(r.offset[index] + r.bytes[index]);
    context.strokeStyle = colour;
    context.lineWidth = width * this.scale;
    context.strokeRect(left, top, Math.max(this.x(r.stop[index]) - left, 3), Math.max(this.y(r.offset[index]) - top, 3));
  }

  drawMarks(context) {
    this.clipped(context, () => {
      context.strokeStyle = this.colour.faint;
      context.lineWidth = this.scale;
      const middle = this.x(this.step + 0.5);
      context.setLineDash([4 * this.scale, 4 * this.scale]);
      context.strokeRect(middle, -2, 0, this.plot.height + 4);
      const arena = this.y(this.plan.arena_bytes);
      context.strokeRect(-2, arena, this.plot.width + 4, 0);
      context.setLineDash([]);
      for (const index of this.hits.slice(0, 500)) this.outline(context, index, this.colour.mark, 1);
      if (this.hovered >= 0) this.outline(context, this.hovered, this.colour.mark, 1.5);
      if (this.selected >= 0) this.outline(context, this.selected, this.colour.mark, 3);
    });
  }

  drawAxes(context) {
    const { left, width, height } = this.plot;
    context.font = `${11 * this.scale}px system-ui, sans-serif`;
    context.fillStyle = this.colour.faint;
    context.strokeStyle = this.colour.line;
    context.lineWidth = this.scale;
    context.strokeRect(left, 0.5, width - 1, height);
    context.textAlign = "right";
    context.textBaseline = "middle";
    const sizes = ticks(Math.max(this.view.y0, 0), this.view.y1, 8, true);
    const names = sizesOf(sizes);
    for (const [i, bytes] of sizes.entries()) {
      context.fillText(names[i], left - 6 * this.scale, clamp(this.y(bytes), 7 * this.scale, height - 6 * this.scale));
    }
    context.textAlign = "center";
    context.textBaseline = "top";
    for (const step of ticks(Math.max(this.view.x0, 0), Math.min(this.view.x1, this.rectangles.stepCount), 9, false).filter(Number.isInteger)) {
      context.fillText(step.toLocaleString("en"), clamp(left + this.x(step), left + 8 * this.scale, left + width - 20 * this.scale), height + 6 * this.scale);
    }
    context.textAlign = "left";
  }

  /** Live bytes of the steps in sight, of each pixel's steps the most, up to the arena. */
  drawCurve(context) {
    const { left, width, height } = this.plot;
    const live = this.rectangles.live;
    const foot = height + FOOT * this.scale - 2;
    const most = Math.max(this.plan.arena_bytes, 1);
    const up = (CURVE * this.scale) / most;
    context.fillStyle = this.colour.kept;
    for (let column = 0; column < width; column++) {
      const from = this.view.x0 + (column / width) * (this.view.x1 - this.view.x0);
      const to = this.view.x0 + ((column + 1) / width) * (this.view.x1 - this.view.x0);
      let most = 0;
      for (let step = Math.max(Math.floor(from), 0); step < Math.min(Math.max(to, Math.floor(from) + 1), live.length); step++) most = Math.max(most, live[step]);
      context.fillRect(left + column, foot - most * up, 1, most * up);
    }
    context.fillStyle = this.colour.faint;
    context.textAlign = "right";
    context.textBaseline = "middle";
    context.fillText("in use", left - 6 * this.scale, foot - 0.5 * CURVE * this.scale);
    context.textAlign = "left";
  }

  /* -- mouse and keyboard */

  place(event) {
    const box = this.canvas.getBoundingClientRect();
    const view = this.view;
    const partX = (event.clientX - box.left - GUTTER) / (box.width - GUTTER);
    const partY = 1 - (event.clientY - box.top) / (box.height - FOOT);
    return { x: view.x0 + partX * (view.x1 - view.x0), y: view.y0 + partY * (view.y1 - view.y0), partX, partY };
  }

  listen() {
    const canvas = this.canvas;
    let drag = null;
    canvas.addEventListener("wheel", (event) => {
      event.preventDefault();
      const { x, y } = this.place(event);
      this.zoom(1.0015 ** (event.deltaY || event.deltaX), x, y, event.shiftKey);
    }, { passive: false });
    canvas.addEventListener("pointerdown", (event) => {
      drag = { x: event.clientX, y: event.clientY, moved: false };
      canvas.setPointerCapture(event.pointerId);
    });
    canvas.addEventListener("pointermove", (event) => {
      const here = this.place(event);
      if (drag) {
        const box = canvas.getBoundingClientRect();
        const [dx, dy] = [event.clientX - drag.x, event.clientY - drag.y];
        if (!drag.moved && Math.abs(dx) + Math.abs(dy) < 4) return;
        this.pan(-dx / (box.width - GUTTER), dy / (box.height - FOOT));
        drag = { x: event.clientX, y: event.clientY, moved: true };
        return;
      }
      const hovered = here.partX >= 0 && here.partY >= 0 ? this.rectangles.at(here.x, here.y) : -1;
      if (hovered === this.hovered) return;
      this.hovered = hovered;
      if (this.selected < 0) this.onSelect(hovered);
      this.redraw();
    });
    canvas.addEventListener("pointerup", (event) => {
      const here = this.place(event);
      if (drag && !drag.moved && here.partX >= 0) {
        this.step = clamp(Math.floor(here.x), 0, this.rectangles.stepCount - 1);
        const index = here.partY >= 0 ? this.rectangles.at(here.x, here.y) : -1;
        this.selected = index;
        this.onSelect(index);
        this.onStep(this.step);
        this.redraw();
      }
      drag = null;
    });
    canvas.addEventListener("pointerleave", () => {
      this.hovered = -1;
      if (this.selected < 0) this.onSelect(-1);
      this.redraw();
    });
    canvas.addEventListener("dblclick", () => this.selected >= 0 && this.show(this.selected));
    canvas.addEventListener("keydown", (event) => this.key(event));
  }

  key(event) {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    const actions = {
      ArrowLeft: () => this.pan(-0.1, 0), ArrowRight: () => this.pan(0.1, 0),
      ArrowUp: () => this.pan(0, 0.1), ArrowDown: () => this.pan(0, -0.1),
      "+": () => this.zoom(0.8), "=": () => this.zoom(0.8), "-": () => this.zoom(1.25),
      0: () => this.fit(), 9: () => this.showAll(),
      n: () => this.go(1), p: () => this.go(-1),
    };
    if (!(event.key in actions)) return;
    event.preventDefault();
    actions[event.key]();
  }

  /** Select the next rectangle, of what a search found where something was. */
  go(by) {
    const among = this.hits;
    const count = among.length || this.rectangles.count;
    if (!count) return;
    const at = among.length ? among.indexOf(this.selected) : this.selected;
    const next = at < 0 ? (by > 0 ? 0 : count - 1) : (at + by + count) % count;
    const index = among.length ? among[next] : next;
    this.show(index);
    this.select(index);
  }
}

const rgb = (hex) => [1, 3, 5].map((at) => parseInt(hex.slice(at, at + 2), 16));
const mixed = (one, other, part) => one.map((value, i) => Math.round(value * part + other[i] * (1 - part)));
const brightness = ([red, green, blue]) => 0.3 * red + 0.59 * green + 0.11 * blue;
const packed = ([red, green, blue]) => ((255 << 24) | (blue << 16) | (green << 8) | red) >>> 0;

/* ---------------------------------------------------------------- the other parts of the page */

function showTotal(data) {
  const { plan } = data;
  const state = data.trains ? "weights and training state" : "weights";
  const parts = [["weight", state, plan.parameter_bytes], ["arena", "arena", plan.arena_bytes], ["workspace", "workspace", plan.workspace_bytes || 0], ["input", "inputs", plan.input_bytes]];
  const bar = make("div", { className: "stack" });
  const words = make("p", { className: "faint" });
  for (const [kind, name, bytes] of parts) {
    const share = (100 * bytes) / Math.max(plan.total_bytes, 1);
    bar.append(make("div", { className: `fill-${kind}`, width: `${share}%`, title: `${name}: ${inFull(bytes)}` }));
    words.append(make("span", { className: `chip fill-${kind}` }), `${name} ${size(bytes)}  `);
  }
  byId("total").append(bar, words, ...sentences(data).map((text) => make("p", {}, text)));
}

/** What is known of the plan, in sentences; a plan from a file knows less. */
function sentences({ plan }) {
  const found = [];
  if (plan.recomputed_nodes) found.push(`${plan.recomputed_nodes.toLocaleString("en")} of ${plan.nodes.toLocaleString("en")} steps compute something again: ${percent(plan.overhead)} of the cost of one pass${plan.planning_seconds === null ? ", as estimated" : ""}.`);
  else found.push(`${plan.nodes.toLocaleString("en")} steps, none of which computes something again.`);
  if (plan.peak_before_bytes !== null) found.push(`In the file's own order, with everything kept, ${size(plan.peak_before_bytes)} of values are in use at the worst step; in this plan ${size(plan.peak_bytes)}.`);
  found.push(plan.arena_bytes === plan.lower_bound_bytes
    ? "The arena is as small as any layout of this order can be."
    : `No layout of this order is smaller than ${size(plan.lower_bound_bytes)}; the arena is ${percent(plan.arena_bytes / plan.lower_bound_bytes - 1, 3)}.`);
  if (plan.stock_bytes) found.push(`Stock onnxruntime is expected to take about ${size(plan.stock_bytes)} in all.`);
  if (plan.budget_bytes !== null) found.push(`The budget was ${size(plan.budget_bytes)}.`);
  if (plan.workspace_bytes === null) found.push("Workspace, what kernels take beside the arena, was not measured: the plan is bound to no machine.");
  return found;
}

function showLegend(data, rectangles) {
  const sums = new Map();
  for (let i = 0; i < rectangles.count; i++) sums.set(rectangles.kindOf(i), (sums.get(rectangles.kindOf(i)) || 0) + 1);
  for (const { name, meaning } of data.kinds) {
    if (sums.has(name)) byId("legend").append(make("span", {}, make("span", { className: `chip fill-${name}` }), meaning));
  }
}

function showDetails(rectangles, data, index) {
  const place = byId("details");
  place.replaceChildren();
  if (index < 0) {
    place.append(make("p", { className: "faint" }, "Point at a rectangle, or select one, to read what it is."));
    return;
  }
  const r = rectangles;
  const kind = r.kindOf(index);
  const rows = [["bytes", inFull(r.bytes[index])]];
  if (r.isInArena(index)) rows.push(["offset", r.offset[index].toLocaleString("en")]);
  if (r.hasStep(index)) {
    rows.push(["needed at steps", kind === "workspace" ? `${r.start[index]}` : `${r.start[index]} to ${r.stop[index] - 1} (${r.stop[index] - r.start[index]})`]);
    rows.push(["operator", r.operator(index)], ["node", r.steps.node[r.start[index]]]);
  }
  if (r.shape(index)) rows.push(["shape", r.shape(index)]);
  if (r.hasStep(index) && r.module(index).length) rows.push(["module", r.module(index).join(" › ")]);
  const list = make("dl", {}, ...rows.map(([name, value]) => make("div", {}, make("dt", {}, name), make("dd", {}, String(value)))));
  const meaning = data.kinds.find((each) => each.name === kind).meaning;
  place.append(make("p", {}, make("span", { className: `chip fill-${kind}` }), make("b", {}, r.name(index)), ` — ${meaning}`), list);
  const others = r.columns.others[index];
  if (others) {
    const more = others[0] > others.length - 1 ? ` and ${others[0] - others.length + 1} more` : "";
    place.append(make("p", { className: "faint" }, `In the same place, in turn: ${others.slice(1).join(", ")}${more}`));
  }
}

/** Bars of what is in memory at a step, by module down to a depth. */
class ModuleBars {
  constructor(place, rectangles) {
    this.rectangles = rectangles;
    this.depth = make("select", { ariaLabel: "Depth of modules" });
    for (const depth of [1, 2, 3, 4]) this.depth.append(make("option", { value: depth }, `${depth} deep`));
    this.title = make("span", {});
    this.bars = make("div", { className: "bars" });
    this.peak = make("button", { type: "button" }, "At the peak");
    place.append(make("div", { className: "tools" }, this.title, make("span", { className: "spread" }), this.peak, this.depth), this.bars);
    this.step = rectangles.peakStep;
    this.depth.value = this.bestDepth();
    this.depth.addEventListener("change", () => this.show(this.step));
    this.peak.addEventListener("click", () => this.show(rectangles.peakStep));
    this.show(this.step);
  }

  groups(step, depth) {
    const r = this.rectangles;
    const groups = new Map();
    for (let i = 0; i < r.count; i++) {
      if (!r.hasStep(i) || r.start[i] > step || r.stop[i] <= step) continue;
      const name = r.module(i).slice(0, depth).join("/") || r.operator(i);
      if (!groups.has(name)) groups.set(name, { name, bytes: 0, kinds: new Map(), count: 0 });
      const group = groups.get(name);
      group.bytes += r.bytes[i];
      group.count += 1;
      group.kinds.set(r.kindOf(i), (group.kinds.get(r.kindOf(i)) || 0) + r.bytes[i]);
    }
    return [...groups.values()].sort((a, b) => b.bytes - a.bytes);
  }

  /** The deepest of one to three with at most 24 bars. */
  bestDepth() {
    return [3, 2, 1].find((depth) => this.groups(this.step, depth).length <= 24) || 1;
  }

  show(step) {
    this.step = step;
    const groups = this.groups(step, Number(this.depth.value));
    const r = this.rectangles;
    const all = groups.reduce((sum, group) => sum + group.bytes, 0);
    const where = step === r.peakStep ? "the peak, " : "";
    this.title.textContent = r.stepCount ? `${size(all)} at ${where}step ${step} (${r.steps.node[step]}). Click into the map for another step.` : "";
    this.bars.replaceChildren();
    for (const group of groups.slice(0, 200)) {
      const bar = make("div", { className: "bar" });
      for (const kind of r.kinds) {
        const bytes = group.kinds.get(kind);
        if (bytes) bar.append(make("div", { className: `fill-${kind}`, width: `${(100 * bytes) / groups[0].bytes}%`, title: `${kind}: ${size(bytes)}` }));
      }
      this.bars.append(make("span", { className: "name" }, group.name), bar, make("span", { className: "size" }, `${size(group.bytes)} in ${group.count}`));
    }
  }
}

/** Lines and points in axes: `x` and `y` are [least, most]. */
class Chart {
  constructor(x, y, nameX, formatX, formatY) {
    Object.assign(this, { x, y });
    this.svg = drawn("svg", { viewBox: "0 0 1360 300", role: "img" });
    this.svg.append(drawn("path", { class: "axis", d: "M80 10V262H1350" }));
    for (const at of ticks(y[0], y[1], 5, formatY === size)) {
      this.svg.append(drawn("path", { class: "axis", d: `M76 ${this.toY(at)}H1350`, opacity: 0.5 }), drawn("text", { x: 70, y: this.toY(at) + 4, "text-anchor": "end" }, formatY(at)));
    }
    for (const part of [0, 0.25, 0.5, 0.75, 1]) {
      const at = x[0] + part * (x[1] - x[0]);
      this.svg.append(drawn("text", { x: this.toX(at), y: 280, "text-anchor": part === 1 ? "end" : "middle" }, formatX(at)));
    }
    this.svg.append(drawn("text", { x: 715, y: 297, "text-anchor": "middle" }, nameX));
  }

  toX(value) {
    return 80 + (1270 * (value - this.x[0])) / (this.x[1] - this.x[0] || 1);
  }

  toY(value) {
    return 262 - (245 * (value - this.y[0])) / (this.y[1] - this.y[0] || 1);
  }

  line(points, kind) {
    this.svg.append(drawn("polyline", { class: kind, points: points.map(([x, y]) => `${this.toX(x).toFixed(1)},${this.toY(y).toFixed(1)}`).join(" ") }));
  }

  level(value, kind) {
    this.line([[this.x[0], value], [this.x[1], value]], kind);
  }

  point(x, y, kind, radius, title) {
    this.svg.append(drawn("circle", { class: kind, cx: this.toX(x), cy: this.toY(y), r: radius }, drawn("title", {}, title)));
  }
}

function showCurve(data, rectangles) {
  const { plan, before } = data;
  const rest = plan.total_bytes - plan.arena_bytes;
  const room = plan.budget_bytes === null ? null : plan.budget_bytes - rest;
  const most = Math.max(plan.arena_bytes, room || 0, ...(before ? before.bytes : []));
  const chart = new Chart([0, 100], [0, most * 1.05 || 1], "part of the run", (x) => `${x.toFixed(0)} %`, size);
  const spread = (values) => values.map((value, i) => [values.length > 1 ? (100 * i) / (values.length - 1) : 0, value]);
  const keys = make("p", { className: "keys" });
  const key = (kind, text) => keys.append(make("span", { className: `${kind}-text` }, text));
  if (before) {
    chart.line(spread(before.bytes), "before");
    key("before", plan.peak_before_bytes === null ? "- - the same order with nothing recomputed" : "- - before: the file's own order, nothing recomputed");
  }
  chart.line(spread(thinned(rectangles.live, 2000)), "now");
  key("now", "— this plan");
  chart.level(plan.lower_bound_bytes, "bound");
  key("bound", `··· lower bound ${size(plan.lower_bound_bytes)}: no layout of this order is smaller`);
  if (room !== null) {
    chart.level(room, "budget");
    key("budget", `— — what the budget leaves for values: ${size(room)}`);
  }
  byId("curve").append(keys, chart.svg);
}

/** The most of each of at most `count` stretches of values. */
function thinned(values, count) {
  const parts = Math.min(count, values.length);
  return Array.from({ length: parts }, (_, i) => {
    const from = Math.floor((i * values.length) / parts);
    const to = Math.floor(((i + 1) * values.length) / parts);
    return values.subarray(from, Math.max(to, from + 1)).reduce((a, b) => Math.max(a, b), 0);
  });
}

function showChoices(data) {
  const place = byId("choices");
  const { plan, candidates, frontier } = data;
  if (!candidates.length && !frontier.length) {
    place.hidden = true;
    return;
  }
  const own = { peak: plan.peak_bytes, overhead: plan.overhead };
  const tried = candidates.map((each) => ({ ...each, kind: "candidate" }));
  const known = frontier.map((each) => ({ peak: each.peak_bytes, overhead: each.overhead, kind: "frontier" })).sort((a, b) => a.peak - b.peak);
  const all = [...tried, ...known, own];
  const most = Math.max(...all.map((each) => each.peak)) * 1.05;
  const highest = Math.max(...all.map((each) => each.overhead), 0.05) * 1.1;
  const chart = new Chart([0, most], [0, highest], "bytes in use at the worst step", size, (y) => percent(y));
  // a plan also serves for every memory up to that of the next one
  const stairs = known.flatMap((each, i) => [[each.peak, each.overhead], [i + 1 < known.length ? known[i + 1].peak : most, each.overhead]]);
  if (known.length) chart.line(stairs, "frontier-line");
  for (const each of all.slice(0, -1)) chart.point(each.peak, each.overhead, each.kind, 5, `${each.kind}: ${size(each.peak)}, ${percent(each.overhead)}`);
  chart.point(own.peak, own.overhead, "chosen", 7, `this plan: ${size(own.peak)}, ${percent(own.overhead)}`);
  place.append(make("p", { className: "faint" }, `Extra cost against the peak. This plan is the large point${candidates.length ? ", circles are what the sweep tried" : ""}${known.length ? ", the line is the frontier: the least cost that was found for each memory" : ""}.`), chart.svg);
  if (!candidates.length) return;
  const rows = candidates.map((each) => [each.source === "none" ? "all kept" : each.source, each.source === "none" ? "" : size(each.threshold), each.segments, size(each.kept_bytes), size(each.peak), percent(each.overhead)]);
  const chosen = candidates.findIndex((each) => each.peak === Math.min(...candidates.map((one) => one.peak)));
  place.append(table(["stages", "threshold", "segments", "kept", "peak", "extra cost"], rows, (row) => row === chosen));
}

function table(names, rows, isChosen = () => false) {
  const isNumber = (value) => typeof value === "number" || /^[−+\d]/.test(value);
  const head = make("tr", {}, ...names.map((name, at) => make("th", { className: rows.some((row) => isNumber(row[at])) ? "number" : "" }, name)));
  const body = rows.map((row, at) => make("tr", { className: isChosen(at) ? "chosen" : "" }, ...row.map((cell) => (cell instanceof Node ? make("td", {}, cell) : make("td", { className: isNumber(cell) ? "number" : "" }, String(cell))))));
  return make("div", { className: "scroll" }, make("table", {}, make("thead", {}, head), make("tbody", {}, ...body)));
}

function showLargest(rectangles, choose) {
  const r = rectangles;
  const order = Array.from({ length: r.count }, (_, i) => i).filter((i) => r.kindOf(i) !== "workspace");
  order.sort((a, b) => r.bytes[b] - r.bytes[a] || a - b);
  const rows = order.slice(0, 100).map((i) => {
    const name = make("button", { type: "button" }, r.name(i));
    name.addEventListener("click", () => choose(i));
    const steps = r.hasStep(i) ? `${r.start[i]} to ${r.stop[i] - 1}` : "always";
    return [name, r.operator(i) || "", r.shape(i), size(r.bytes[i]), r.isInArena(i) ? r.offset[i].toLocaleString("en") : "", steps, r.kindOf(i)];
  });
  byId("largest").append(table(["tensor", "operator", "shape", "bytes", "offset", "steps", "kind"], rows));
}

function showMeasured(data) {
  const place = byId("measured");
  const { measured, plan } = data;
  if (!measured) {
    place.hidden = true;
    return;
  }
  const rows = [];
  const add = (name, session, planned) => session && rows.push([
    name, session.peak_bytes === null || session.peak_bytes === undefined ? "not measured" : size(session.peak_bytes),
    planned === undefined ? "" : size(planned), session.latency_seconds === undefined ? "" : `${(1000 * session.latency_seconds).toFixed(2)} ms`,
    session.bitwise_equal === undefined ? "" : session.bitwise_equal ? "identical" : `differ by ${Number(session.max_abs_diff).toPrecision(2)}`,
  ]);
  add("planned", { ...measured, bitwise_equal: undefined }, plan.predicted_bytes ?? plan.arena_bytes);
  add("stock onnxruntime, same level", measured.stock_session);
  add("stock onnxruntime, default options", measured.default_session);
  place.append(make("p", { className: "faint" }, "Memory is the most that a run takes above the loaded model; what the plan says of it stands beside."), table(["session", "measured", "planned", "time", "outputs"], rows));
}

function showNotes({ plan }) {
  const facts = [`Planned for ${plan.mode}`, plan.device === "none" ? "portable, for any runtime" : `device ${plan.device}`];
  if (plan.batch !== null) facts.push(`batch ${plan.batch}`);
  if (plan.strategy) facts.push(`strategy ${plan.strategy}`);
  if (plan.planning_seconds !== null) facts.push(`in ${plan.planning_seconds.toFixed(1)} s`);
  byId("notes").append(make("p", {}, `${facts.join(", ")}.`), ...plan.notes.map((note) => make("p", {}, note)));
  if (plan.unplanned_values.length) byId("notes").append(make("p", {}, `${plan.unplanned_values.length} values are of a size or type that can't be planned; the runtime keeps them.`));
}

/* ---------------------------------------------------------------- search, theme, keys */

function listenToSearch(map, rectangles) {
  const field = byId("search");
  const search = () => {
    const hits = rectangles.find(field.value);
    map.mark(hits);
    const sum = hits.reduce((total, i) => total + rectangles.bytes[i], 0);
    byId("found").textContent = !field.value.trim() ? "" : hits.length ? `${hits.length} found, ${size(sum)}; Enter shows the next` : "nothing found";
  };
  field.addEventListener("input", search);
  field.addEventListener("keydown", (event) => {
    if (event.key === "Enter") map.go(event.shiftKey ? -1 : 1);
  });
  document.addEventListener("keydown", (event) => {
    if (event.key === "/" && document.activeElement !== field) {
      event.preventDefault();
      field.focus();
      field.select();
    } else if (event.key === "Escape") {
      field.value = "";
      search();
      map.select(-1);
      if (document.activeElement === field) byId("map").focus();
    }
  });
}

function listenToTheme(map) {
  const button = byId("theme");
  const dark = window.matchMedia("(prefers-color-scheme: dark)");
  const set = (name) => {
    document.documentElement.dataset.theme = name;
    button.textContent = name === "dark" ? "Light" : "Dark";
    map.recolour();
  };
  button.addEventListener("click", () => set(document.documentElement.dataset.theme === "dark" ? "light" : "dark"));
  dark.addEventListener("change", () => set(dark.matches ? "dark" : "light"));
  window.addEventListener("beforeprint", () => {
    map.themeOnScreen = document.documentElement.dataset.theme;
    set("light");
    map.draw();
  });
  window.addEventListener("afterprint", () => set(map.themeOnScreen));
  set(dark.matches ? "dark" : "light");
}

async function main() {
  const data = await unpack();
  const rectangles = new Rectangles(data);
  showTotal(data);
  showLegend(data, rectangles);
  const details = (index) => showDetails(rectangles, data, index);
  let bars = null;
  const map = new ArenaMap(byId("map"), rectangles, data.plan, details, (step) => bars.show(step));
  details(-1);
  listenToTheme(map);
  map.draw();
  performance.mark("map drawn");
  bars = new ModuleBars(byId("modules"), rectangles);
  showCurve(data, rectangles);
  showLargest(rectangles, (index) => {
    map.show(index);
    map.select(index);
    byId("map").scrollIntoView({ block: "center" });
  });
  showChoices(data);
  showMeasured(data);
  showNotes(data);
  listenToSearch(map, rectangles);
  byId("zoom-in").addEventListener("click", () => map.zoom(0.7));
  byId("zoom-out").addEventListener("click", () => map.zoom(1.4));
  byId("fit").addEventListener("click", () => map.fit());
  byId("all").addEventListener("click", () => map.showAll());
  document.documentElement.dataset.ready = "true";
}

main().catch((error) => {
  byId("summary").textContent += ` This page could not be drawn: ${error.message}. It needs a browser of 2023 or later.`;
});
