"use strict";

// The page of `memonger report`: data.js, map.js and page.js, one after another. Data come as compressed JSON; names in
// them are only ever put into text nodes and onto the canvas, so that none is read as HTML. Nothing is loaded.

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
