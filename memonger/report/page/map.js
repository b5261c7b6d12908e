// The map of the arena: steps across, addresses upwards.

const GUTTER = 76; // pixels for the sizes at the left
const FOOT = 96; // for the steps and the curve below
const CURVE = 66;

/** The canvas: what is in sight, drawn pixel by pixel. Rectangles don't overlap, so a frame costs about its pixels. */
class ArenaMap {
  constructor(canvas, rectangles, plan, onSelect, onStep) {
    Object.assign(this, { canvas, rectangles, plan, onSelect, onStep });
    this.selected = -1;
    this.hovered = -1;
    this.pointer = null;
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
    const arena = this.plan.arena_bytes + (this.plan.workspace_bytes || 0) + (this.plan.run_time_bytes || 0);
    this.view = { x0: 0, x1: Math.max(this.rectangles.stepCount, 1), y0: 0, y1: Math.max(arena, 1) };
    this.redraw();
  }

  showAll() {
    this.view = { x0: 0, x1: Math.max(this.rectangles.stepCount, 1), y0: 0, y1: Math.max(this.plan.total_bytes, 1) };
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
    const spanX = Math.min(Math.max(width * 3, 40), r.stepCount * 1.05);
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
    const shades = this.rectangles.kinds.map((name) => [1, 0.86, 0.74].map((part) => mixed(rgb(read(name)), page, part)));
    this.shades = shades.map((each) => each.map(packed));
    this.inks = shades.map((each) => each.map((shade) => (brightness(shade) > 125 ? "#000" : "#fff")));
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
    this.drawTip(context);
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
        context.fillStyle = this.isHit && !this.isHit[i] ? this.colour.faint : this.inks[r.kind[i]][i % 3];
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
    const [first, last] = [Math.max(this.view.x0, 0), Math.min(this.view.x1, this.rectangles.stepCount)];
    const count = clamp((this.x(last) - this.x(first)) / (110 * this.scale), 1, 12);
    for (const step of ticks(first, last, count, false).filter(Number.isInteger)) {
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

  /** What the mouse points at, beside it. */
  drawTip(context) {
    if (!this.pointer || this.hovered < 0) return;
    const box = this.canvas.getBoundingClientRect();
    const text = `${this.rectangles.name(this.hovered)}   ${size(this.rectangles.bytes[this.hovered])}`;
    context.font = `${12 * this.scale}px system-ui, sans-serif`;
    const wide = context.measureText(text).width + 12 * this.scale;
    const left = clamp((this.pointer.clientX - box.left + 14) * this.scale, 0, Math.max(this.canvas.width - wide, 0));
    const top = clamp((this.pointer.clientY - box.top - 30) * this.scale, 0, this.plot.height);
    context.fillStyle = this.colour.page;
    context.strokeStyle = this.colour.faint;
    context.lineWidth = this.scale;
    context.fillRect(left, top, wide, 22 * this.scale);
    context.strokeRect(left, top, wide, 22 * this.scale);
    context.fillStyle = this.colour.ink;
    context.textBaseline = "middle";
    context.fillText(text, left + 6 * this.scale, top + 11 * this.scale);
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
      this.pointer = hovered < 0 ? null : event;
      if (hovered !== this.hovered) this.onSelect(hovered >= 0 ? hovered : this.selected);
      if (hovered >= 0 || hovered !== this.hovered) this.redraw();
      this.hovered = hovered;
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
      this.pointer = null;
      this.onSelect(this.selected);
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
