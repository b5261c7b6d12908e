// Runs a model in Node.js, and says what it took. Needs: npm install onnxruntime-node, or onnxruntime-web with --web.
//
//     node node.js [--web] model.onnx outputs input:float32:16x3x224x224:input.bin
//
// Each input has a name, type, shape and a file of its numbers. Outputs are written to outputs.0.bin and so on. Printed
// is a line of JSON: bytes of memory once loaded and the most of a run beyond that, and the seconds of the fastest run.
// Of onnxruntime-node that is the process's own memory (Linux tells), of onnxruntime-web WebAssembly's.

const fs = require("fs");

const ARRAYS = {
  float32: Float32Array, float64: Float64Array, float16: Uint16Array, int64: BigInt64Array, int32: Int32Array,
  uint8: Uint8Array, int8: Int8Array, bool: Uint8Array,
};

function statusBytes(name) {
  const found = fs.readFileSync("/proc/self/status", "utf8").match(new RegExp(`^${name}:\\s+(\\d+)`, "m"));
  return found ? Number(found[1]) * 1024 : 0;
}

// What WebAssembly has taken: its memory is made by the package, and found where its instances export it.
function watchWebAssembly() {
  const memories = new Set();
  const Memory = WebAssembly.Memory;
  WebAssembly.Memory = function (descriptor) {
    const memory = new Memory(descriptor);
    memories.add(memory);
    return memory;
  };
  WebAssembly.Memory.prototype = Memory.prototype;
  const instantiate = WebAssembly.instantiate;
  WebAssembly.instantiate = async (...given) => {
    const made = await instantiate(...given);
    for (const one of Object.values((made.instance || made).exports)) if (one instanceof Memory) memories.add(one);
    return made;
  };
  return () => [...memories].reduce((sum, memory) => sum + memory.buffer.byteLength, 0);
}

function readInput(ort, told) {
  const [file, shape, type, ...name] = told.split(":").reverse();
  if (!name.length) throw new Error(`${told} isn't NAME:TYPE:SHAPE:FILE`);
  const bytes = fs.readFileSync(file);
  const numbers = new ARRAYS[type](bytes.buffer.slice(bytes.byteOffset, bytes.byteOffset + bytes.length));
  return [name.reverse().join(":"), new ort.Tensor(type, numbers, shape ? shape.split("x").map(Number) : [])];
}

async function main() {
  const words = process.argv.slice(2);
  const web = words[0] === "--web";
  const [path, prefix, ...told] = web ? words.slice(1) : words;
  if (!told.length) throw new Error("usage: node.js [--web] MODEL OUTPUTS NAME:TYPE:SHAPE:FILE...");
  const taken = web ? watchWebAssembly() : () => statusBytes("RssAnon");
  const ort = web ? await import("onnxruntime-web/wasm") : require("onnxruntime-node");
  const feeds = Object.fromEntries(told.map((one) => readInput(ort, one)));
  if (web) ort.env.wasm.numThreads = 1;

  const start = taken();
  const session = web
    ? await ort.InferenceSession.create(new Uint8Array(fs.readFileSync(path)), { executionProviders: ["wasm"] })
    : await ort.InferenceSession.create(path);
  const loaded = taken();

  let [results, most, fastest] = [{}, 0, Infinity];
  for (let turn = 0; turn < (web ? 2 : 4); turn++) {
    results = {};
    if (turn === 1 && !web) fs.writeFileSync("/proc/self/clear_refs", "5");
    const begin = performance.now();
    results = await session.run(feeds);
    if (turn > 0) fastest = Math.min(fastest, (performance.now() - begin) / 1000);
    if (turn === 1) most = web ? taken() : statusBytes("VmHWM") - statusBytes("RssFile");
  }
  session.outputNames.forEach((name, number) => {
    const { buffer, byteOffset, byteLength } = results[name].data;
    fs.writeFileSync(`${prefix}.${number}.bin`, Buffer.from(buffer, byteOffset, byteLength));
  });
  const version = ort.env.versions[web ? "web" : "node"] || ort.env.versions.common;
  console.log(JSON.stringify({ version, loaded_bytes: loaded - start, run_bytes: most - loaded, seconds: fastest }));
}

main().catch((error) => {
  console.error(error.message);
  process.exit(1);
});
