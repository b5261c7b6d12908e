// Runs one model: on a picture, see index.html; or on files of numbers, each with a name, type and shape.

// WebAssembly's memory is made by the package, and found where its instances export it
const memories = new Set();
const { Memory, instantiate, instantiateStreaming } = WebAssembly;
WebAssembly.Memory = function (descriptor) {
  const memory = new Memory(descriptor);
  memories.add(memory);
  return memory;
};
WebAssembly.Memory.prototype = Memory.prototype;
const watched = (make) => async (...given) => {
  const made = await make.apply(WebAssembly, given);
  for (const one of Object.values((made.instance || made).exports)) if (one instanceof Memory) memories.add(one);
  return made;
};
WebAssembly.instantiate = watched(instantiate);
WebAssembly.instantiateStreaming = watched(instantiateStreaming);
const taken = () => [...memories].reduce((sum, memory) => sum + memory.buffer.byteLength, 0);

function toTensor(ort, picture, [count, channels, height, width], across) {
  const down = Math.ceil(count / across), canvas = new OffscreenCanvas(across * width, down * height);
  const pen = canvas.getContext("2d", { willReadFrequently: true });
  pen.drawImage(picture, 0, 0, canvas.width, canvas.height);
  const input = pen.getImageData(0, 0, canvas.width, canvas.height);
  const numbers = new Float32Array(count * channels * height * width);
  for (let n = 0, at = 0; n < count; n++) {
    const left = (n % across) * width, top = Math.floor(n / across) * height;
    for (let c = 0; c < channels; c++)
      for (let y = 0; y < height; y++)
        for (let x = 0; x < width; x++) numbers[at++] = input.data[4 * ((top + y) * canvas.width + left + x) + c] / 255;
  }
  return [new ort.Tensor("float32", numbers, [count, channels, height, width]), input];
}

function toPicture({ data, dims: [count, channels, height, width] }, across) {
  const down = Math.ceil(count / across), picture = new ImageData(across * width, down * height);
  picture.data.fill(255);
  for (let n = 0; n < count; n++) {
    const left = (n % across) * width, top = Math.floor(n / across) * height;
    for (let c = 0; c < 3; c++)
      for (let y = 0; y < height; y++)
        for (let x = 0; x < width; x++)
          picture.data[4 * ((top + y) * picture.width + left + x) + c] =
            255 * data[((n * channels + Math.min(c, channels - 1)) * height + y) * width + x];
  }
  return picture;
}

async function toTensors(ort, files) {
  const arrays = { float32: Float32Array, int64: BigInt64Array, int32: Int32Array, uint8: Uint8Array, bool: Uint8Array };
  const feeds = {};
  for (const [name, type, shape, file] of files)
    feeds[name] = new ort.Tensor(type, new arrays[type](await (await fetch(file)).arrayBuffer()), shape);
  return feeds;
}

async function run({ model, picture, path, feeds: files }) {
  const ort = await import("./ort.wasm.min.mjs");
  ort.env.wasm.numThreads = 1;
  if (files) model = new Uint8Array(await (await fetch(path)).arrayBuffer());
  const start = taken();
  const session = await ort.InferenceSession.create(model, { executionProviders: ["wasm"] });
  const loaded = taken() - start;
  let [feeds, input, across] = [null, null, 1];
  if (files) feeds = await toTensors(ort, files);
  else {
    const { shape, name } = session.inputMetadata[0];
    const sizes = shape.map((size) => (typeof size === "number" ? size : 1));
    across = Math.ceil(Math.sqrt(sizes[0]));
    const [tensor, seen] = toTensor(ort, picture, sizes, across);
    [feeds, input] = [{ [name]: tensor }, seen];
  }
  let [seconds, results] = [Infinity, null];
  for (let turn = 0; turn < 2; turn++) {
    const begin = performance.now();
    results = await session.run(feeds);
    seconds = Math.min(seconds, (performance.now() - begin) / 1000);
  }
  const digests = [];
  for (const name of session.outputNames)
    digests.push([...new Uint8Array(await crypto.subtle.digest("SHA-256", results[name].data))].join(" "));
  const told = { loaded, most: taken() - start, seconds, digests, digest: digests[0] };
  return files ? told : { ...told, input, output: toPicture(results[session.outputNames[0]], across) };
}

onmessage = ({ data }) => run(data).then(postMessage, (error) => postMessage({ error: error.message }));
