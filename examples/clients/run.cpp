// Runs a model through onnxruntime's C interface, and says what it took: in C++, without Python.
//
//     g++ -O2 -std=c++17 run.cpp -I INCLUDE -L LIBRARY -l:libonnxruntime.so.1 -Wl,-rpath,LIBRARY -o run
//     ./run model.onnx outputs input:float32:16x3x224x224:input.bin
//
// Each input has a name, type, shape and a file of its numbers. Outputs are written to outputs.0.bin and so on. Printed
// is a line of JSON: bytes of the process's own memory once loaded and the most of a run beyond that (Linux tells), and
// the seconds of the fastest run.

#include <malloc.h>
#include <onnxruntime_c_api.h>

#include <chrono>
#include <fstream>
#include <iostream>
#include <iterator>
#include <map>
#include <sstream>
#include <stdexcept>
#include <string>
#include <vector>

static const OrtApi* api = OrtGetApiBase()->GetApi(ORT_API_VERSION);

static void check(OrtStatus* status) {
  if (status != nullptr) throw std::runtime_error(api->GetErrorMessage(status));
}

static long status_bytes(const std::string& wanted) {
  std::ifstream status("/proc/self/status");
  for (std::string line; std::getline(status, line);)
    if (line.rfind(wanted + ":", 0) == 0) return std::stol(line.substr(wanted.size() + 1)) * 1024;
  return 0;
}

static long settled() {
  malloc_trim(0);
  return status_bytes("RssAnon");
}

static const std::map<std::string, ONNXTensorElementDataType> types = {
    {"float32", ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT}, {"float64", ONNX_TENSOR_ELEMENT_DATA_TYPE_DOUBLE},
    {"float16", ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT16}, {"int64", ONNX_TENSOR_ELEMENT_DATA_TYPE_INT64},
    {"int32", ONNX_TENSOR_ELEMENT_DATA_TYPE_INT32}, {"uint8", ONNX_TENSOR_ELEMENT_DATA_TYPE_UINT8},
    {"int8", ONNX_TENSOR_ELEMENT_DATA_TYPE_INT8}, {"bool", ONNX_TENSOR_ELEMENT_DATA_TYPE_BOOL}};

struct Input {
  std::string name;
  std::vector<char> numbers;
  OrtValue* value = nullptr;
};

// NAME:TYPE:SHAPE:FILE, where the name may have colons of its own
static Input read_input(const std::string& told, const OrtMemoryInfo* memory) {
  std::vector<std::string> parts;
  std::istringstream stream(told);
  for (std::string part; std::getline(stream, part, ':');) parts.push_back(part);
  if (parts.size() < 4) throw std::runtime_error(told + " isn't NAME:TYPE:SHAPE:FILE");
  const size_t last = parts.size() - 1;
  Input input;
  for (size_t i = 0; i + 3 <= last; i++) input.name += (i ? ":" : "") + parts[i];
  std::vector<int64_t> shape;
  std::istringstream dims(parts[last - 1]);
  for (std::string dim; std::getline(dims, dim, 'x');) shape.push_back(std::stoll(dim));
  std::ifstream file(parts[last], std::ios::binary);
  if (!file) throw std::runtime_error("can't read " + parts[last]);
  input.numbers.assign(std::istreambuf_iterator<char>(file), {});
  check(api->CreateTensorWithDataAsOrtValue(memory, input.numbers.data(), input.numbers.size(), shape.data(),
                                            shape.size(), types.at(parts[last - 2]), &input.value));
  return input;
}

static size_t bytes_of(const OrtValue* value) {
  size_t bytes = 0;
  check(api->GetTensorSizeInBytes(value, &bytes));
  return bytes;
}

static int run(int count, char** words) {
  if (count < 4) throw std::runtime_error("usage: run MODEL OUTPUTS NAME:TYPE:SHAPE:FILE...");
  OrtEnv* environment = nullptr;
  OrtSessionOptions* options = nullptr;
  OrtMemoryInfo* memory = nullptr;
  OrtAllocator* allocator = nullptr;
  OrtSession* session = nullptr;
  check(api->CreateEnv(ORT_LOGGING_LEVEL_ERROR, "run", &environment));
  check(api->CreateSessionOptions(&options));
  check(api->CreateCpuMemoryInfo(OrtArenaAllocator, OrtMemTypeDefault, &memory));
  check(api->GetAllocatorWithDefaultOptions(&allocator));
  std::vector<Input> inputs;
  for (int i = 3; i < count; i++) inputs.push_back(read_input(words[i], memory));

  const long start = settled();
  check(api->CreateSession(environment, words[1], options, &session));
  const long loaded = settled();

  size_t output_count = 0;
  check(api->SessionGetOutputCount(session, &output_count));
  std::vector<const char*> input_names, output_names;
  std::vector<const OrtValue*> values;
  for (const Input& input : inputs) input_names.push_back(input.name.c_str()), values.push_back(input.value);
  for (size_t i = 0; i < output_count; i++) {
    char* name = nullptr;
    check(api->SessionGetOutputName(session, i, allocator, &name));
    output_names.push_back(name);
  }
  std::vector<OrtValue*> outputs(output_count);
  long most = 0;
  double fastest = 1e9;
  for (int turn = 0; turn < 4; turn++) {
    for (OrtValue*& output : outputs) {
      if (output != nullptr) api->ReleaseValue(output);
      output = nullptr;
    }
    if (turn == 1) {  // from the second run on nothing more is taken
      settled();
      std::ofstream("/proc/self/clear_refs") << 5;
    }
    const auto begin = std::chrono::steady_clock::now();
    check(api->Run(session, nullptr, input_names.data(), values.data(), values.size(), output_names.data(),
                   output_count, outputs.data()));
    const std::chrono::duration<double> took = std::chrono::steady_clock::now() - begin;
    if (turn == 1) most = status_bytes("VmHWM") - status_bytes("RssFile");
    if (turn > 0 && took.count() < fastest) fastest = took.count();
  }
  for (size_t i = 0; i < output_count; i++) {
    void* numbers = nullptr;
    check(api->GetTensorMutableData(outputs[i], &numbers));
    std::ofstream file(std::string(words[2]) + "." + std::to_string(i) + ".bin", std::ios::binary);
    file.write(static_cast<const char*>(numbers), static_cast<std::streamsize>(bytes_of(outputs[i])));
    if (!file) throw std::runtime_error("can't write the outputs");
  }
  std::cout << "{\"version\": \"" << OrtGetApiBase()->GetVersionString() << "\", \"loaded_bytes\": " << loaded - start
            << ", \"run_bytes\": " << most - loaded << ", \"seconds\": " << fastest << "}" << std::endl;
  return 0;
}

int main(int count, char** words) {
  try {
    if (api == nullptr) throw std::runtime_error("this library is older than the header that it was built with");
    return run(count, words);
  } catch (const std::exception& error) {
    std::cerr << error.what() << std::endl;
    return 1;
  }
}
