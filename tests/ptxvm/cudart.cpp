// A stand-in for libcudart: takes the PTX out of a program's fat binary and turns kernel<<<...>>> into a run of the
// interpreter. Device memory is host memory. It is as strict as the driver about launches. Streams are ignored: all is
// in order.
#include <cuda_runtime_api.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <string>
#include <vector>

#include "api.h"

namespace {

// The PTX of one fat binary, by architecture: compute_80 and compute_90, say.
struct FatBinary {
  std::vector<int> modules;
};

struct Function {
  const FatBinary* binary;
  std::string name;
  int max_dynamic_shared = -1;  // what cudaFuncSetAttribute said
};

constexpr int kSharedWithoutAttribute = 48 << 10;
constexpr uint32_t kMaxThreads = 1024, kMaxGridYz = 65535, kMaxGridX = 0x7FFFFFFF;
constexpr uint32_t kMaxParameterBytes = 4096;

std::map<const void*, Function>& functions() {
  static std::map<const void*, Function> all;
  return all;
}

cudaError_t& last_error() {
  static thread_local cudaError_t error = cudaSuccess;
  return error;
}

cudaError_t keep(cudaError_t error) {
  if (error != cudaSuccess) last_error() = error;
  return error;
}

struct Configuration {
  dim3 grid, block;
  size_t shared;
  cudaStream_t stream;
};
Configuration& configuration() {
  static thread_local Configuration pushed;
  return pushed;
}

[[noreturn]] void give_up(const std::string& message) {
  std::fprintf(stderr, "ptxvm cudart: %s\n", message.c_str());
  std::abort();
}

template <class T>
T read(const uint8_t* from) {
  T value;
  std::memcpy(&value, from, sizeof value);
  return value;
}

// A fat binary: a header (its own size at byte 6, that of the rest at 8), then entries of kind, header size (4), size
// (8); kind 1 is PTX. Compressed text does not begin with a comment.
void load_fat_binary(const uint8_t* data, FatBinary& binary) {
  const uint8_t* entry = data + read<uint16_t>(data + 6);
  const uint8_t* const end = entry + read<uint64_t>(data + 8);
  while (entry < end) {
    const uint32_t header = read<uint32_t>(entry + 4);
    const uint64_t size = read<uint64_t>(entry + 8);
    if (read<uint16_t>(entry) == 1) {
      const char* text = reinterpret_cast<const char*>(entry + header);
      if (std::strncmp(text, "//", 2) != 0 && !std::memchr(text, '.', 64)) {
        give_up("the PTX is compressed: compile with nvcc --no-compress");
      }
      const int module = ptxvm_load(text, strnlen(text, size));
      if (module < 0) give_up(std::string("cannot read the PTX: ") + ptxvm_error());
      binary.modules.push_back(module);
    }
    entry += header + size;
  }
}

// The newest PTX that the device can run.
int choose_module(const Function& function) {
  int major, minor, multiprocessors, best = -1;
  ptxvm_get_device(&major, &minor, &multiprocessors);
  for (int module : function.binary->modules) {
    const int architecture = ptxvm_architecture(module);
    if (architecture > 10 * major + minor || !ptxvm_has_kernel(module, function.name.c_str())) continue;
    if (best < 0 || architecture > ptxvm_architecture(best)) best = module;
  }
  return best;
}

// The most that a block of this architecture may have.
int shared_per_block() {
  int major, minor, multiprocessors;
  ptxvm_get_device(&major, &minor, &multiprocessors);
  if (major == 8 && minor % 7 == 0) return 163 << 10;       // sm_80, sm_87
  return major == 8 || major == 12 ? 99 << 10 : 227 << 10;  // sm_86, sm_89, sm_120; sm_90, sm_100
}

bool valid(dim3 grid, dim3 block) {
  const bool some = grid.x && grid.y && grid.z && block.x && block.y && block.z;
  const uint64_t threads = uint64_t(block.x) * block.y * block.z;
  return some && grid.x <= kMaxGridX && grid.y <= kMaxGridYz && grid.z <= kMaxGridYz && threads <= kMaxThreads &&
         block.z <= 64;
}

cudaError_t launch(const void* host_function, dim3 grid, dim3 block, void** arguments, size_t shared) {
  const auto found = functions().find(host_function);
  if (found == functions().end()) return cudaErrorInvalidDeviceFunction;
  const Function& function = found->second;
  if (!valid(grid, block)) return cudaErrorInvalidConfiguration;
  const int module = choose_module(function);
  if (module < 0) return cudaErrorNoKernelImageForDevice;
  const char* name = function.name.c_str();
  uint32_t static_shared, max_threads;
  if (ptxvm_limits(module, name, &static_shared, &max_threads)) return cudaErrorInvalidKernelImage;
  if (block.x * block.y * block.z > max_threads) return cudaErrorLaunchOutOfResources;
  const int raised = function.max_dynamic_shared,
            allowed = raised < 0 ? kSharedWithoutAttribute - int(static_shared) : raised;
  if (int64_t(shared) > allowed) return cudaErrorInvalidValue;
  std::vector<uint8_t> parameters(kMaxParameterBytes);
  uint32_t offset, size;
  for (int i = 0; ptxvm_parameter(module, name, i, &offset, &size) > 0; ++i) {
    if (offset + size > kMaxParameterBytes) return cudaErrorInvalidValue;
    std::memcpy(parameters.data() + offset, arguments[i], size);
  }
  const uint32_t grid3[3] = {grid.x, grid.y, grid.z}, block3[3] = {block.x, block.y, block.z};
  const int result = ptxvm_launch(module, name, grid3, block3, uint32_t(shared), parameters.data());
  return result ? cudaErrorLaunchFailure : cudaSuccess;
}

void check_host_range(const char* what, const void* begin, size_t bytes) {
  if (bytes && !ptxvm_is_registered(begin, bytes)) ptxvm_finding((std::string(what) + " out of bounds").c_str());
}

}  // namespace

extern "C" {

// ---- What nvcc's host code calls
// -------------------------------------------------------------------------------------

void** __cudaRegisterFatBinary(void* wrapper) {
  auto* binary = new FatBinary;  // lives as long as the program
  load_fat_binary(*reinterpret_cast<const uint8_t**>(static_cast<char*>(wrapper) + 8), *binary);
  return reinterpret_cast<void**>(binary);
}
void __cudaRegisterFatBinaryEnd(void**) {}
void __cudaUnregisterFatBinary(void**) {}

void __cudaRegisterFunction(void** handle, const char* host_function, char*, const char* name, int, uint3*, uint3*,
                            dim3*, dim3*, int*) {
  functions()[host_function] = {reinterpret_cast<const FatBinary*>(handle), name};
}
void __cudaRegisterVar(void**, char*, char*, const char*, int, size_t, int, int) {}

unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared, CUstream_st* stream) {
  configuration() = {grid, block, shared, stream};
  return 0;
}
cudaError_t __cudaPopCallConfiguration(dim3* grid, dim3* block, size_t* shared, void* stream) {
  *grid = configuration().grid, *block = configuration().block, *shared = configuration().shared;
  std::memcpy(stream, &configuration().stream, sizeof(cudaStream_t));
  return cudaSuccess;
}
cudaError_t __cudaGetKernel(cudaKernel_t* kernel, const void* host_function) {
  *kernel = reinterpret_cast<cudaKernel_t>(const_cast<void*>(host_function));
  return cudaSuccess;
}
cudaError_t __cudaLaunchKernel(cudaKernel_t kernel, dim3 grid, dim3 block, void** arguments, size_t shared,
                               cudaStream_t) {
  return keep(launch(reinterpret_cast<const void*>(kernel), grid, block, arguments, shared));
}

// ---- What launchers call
// ---------------------------------------------------------------------------------------------

cudaError_t cudaLaunchKernel(const void* function, dim3 grid, dim3 block, void** arguments, size_t shared,
                             cudaStream_t) {
  return keep(launch(function, grid, block, arguments, shared));
}
cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t* config, const void* function, void** arguments) {
  return keep(launch(function, config->gridDim, config->blockDim, arguments, config->dynamicSmemBytes));
}

cudaError_t cudaFuncSetAttribute(const void* function, cudaFuncAttribute attribute, int value) {
  const auto found = functions().find(function);
  if (found == functions().end()) return keep(cudaErrorInvalidDeviceFunction);
  if (attribute != cudaFuncAttributeMaxDynamicSharedMemorySize) return cudaSuccess;  // hints
  uint32_t static_shared, max_threads;
  const int module = choose_module(found->second);
  if (module < 0) return keep(cudaErrorNoKernelImageForDevice);
  if (ptxvm_limits(module, found->second.name.c_str(), &static_shared, &max_threads))
    return keep(cudaErrorInvalidKernelImage);
  if (value < 0 || value > shared_per_block() - int(static_shared)) return keep(cudaErrorInvalidValue);
  found->second.max_dynamic_shared = value;
  return cudaSuccess;
}

cudaError_t cudaMemsetAsync(void* to, int value, size_t bytes, cudaStream_t) {
  check_host_range("cudaMemsetAsync", to, bytes);
  std::memset(to, value, bytes);
  return cudaSuccess;
}
cudaError_t cudaMemset(void* to, int value, size_t bytes) { return cudaMemsetAsync(to, value, bytes, nullptr); }
cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t bytes, cudaMemcpyKind kind, cudaStream_t) {
  if (kind == cudaMemcpyHostToDevice || kind == cudaMemcpyDeviceToDevice)
    check_host_range("cudaMemcpyAsync to", to, bytes);
  if (kind == cudaMemcpyDeviceToHost || kind == cudaMemcpyDeviceToDevice)
    check_host_range("cudaMemcpyAsync from", from, bytes);
  std::memmove(to, from, bytes);
  return cudaSuccess;
}
cudaError_t cudaMemcpy(void* to, const void* from, size_t bytes, cudaMemcpyKind kind) {
  return cudaMemcpyAsync(to, from, bytes, kind, nullptr);
}
cudaError_t cudaMalloc(void** to, size_t bytes) {
  *to = std::aligned_alloc(256, (bytes + 255) / 256 * 256 + 256);
  if (!*to) return keep(cudaErrorMemoryAllocation);
  std::memset(*to, 0xFF, bytes);
  ptxvm_register(*to, bytes, 1, "cudaMalloc");
  return cudaSuccess;
}
cudaError_t cudaFree(void* memory) {
  if (memory) ptxvm_unregister(memory);
  std::free(memory);
  return cudaSuccess;
}

cudaError_t cudaGetLastError() {
  const cudaError_t error = last_error();
  last_error() = cudaSuccess;
  return error;
}
cudaError_t cudaPeekAtLastError() { return last_error(); }
const char* cudaGetErrorName(cudaError_t error) { return error == cudaSuccess ? "cudaSuccess" : "cudaError"; }
const char* cudaGetErrorString(cudaError_t error) {
  switch (error) {
    case cudaSuccess: return "no error";
    case cudaErrorInvalidValue: return "invalid argument";
    case cudaErrorMemoryAllocation: return "out of memory";
    case cudaErrorLaunchOutOfResources: return "too many resources requested for launch";
    case cudaErrorInvalidConfiguration: return "invalid configuration argument";
    case cudaErrorInvalidDeviceFunction: return "invalid device function";
    case cudaErrorNoKernelImageForDevice: return "no kernel image is available for execution on the device";
    case cudaErrorLaunchFailure: return "unspecified launch failure (see the interpreter's findings)";
    default: return "CUDA error of the stand-in runtime";
  }
}

cudaError_t cudaGetDevice(int* device) { return *device = 0, cudaSuccess; }
cudaError_t cudaSetDevice(int device) { return device ? keep(cudaErrorInvalidDevice) : cudaSuccess; }
cudaError_t cudaGetDeviceCount(int* count) { return *count = 1, cudaSuccess; }
cudaError_t cudaDeviceSynchronize() { return cudaSuccess; }
cudaError_t cudaStreamSynchronize(cudaStream_t) { return cudaSuccess; }

cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int) {
  int major, minor, multiprocessors;
  ptxvm_get_device(&major, &minor, &multiprocessors);
  switch (attribute) {
    case cudaDevAttrComputeCapabilityMajor: *value = major; break;
    case cudaDevAttrComputeCapabilityMinor: *value = minor; break;
    case cudaDevAttrMultiProcessorCount: *value = multiprocessors; break;
    case cudaDevAttrMaxSharedMemoryPerBlock: *value = kSharedWithoutAttribute; break;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin: *value = shared_per_block(); break;
    case cudaDevAttrMaxSharedMemoryPerMultiprocessor: *value = shared_per_block() + 1024; break;
    case cudaDevAttrMaxThreadsPerBlock: *value = int(kMaxThreads); break;
    case cudaDevAttrMaxThreadsPerMultiProcessor: *value = 2048; break;
    case cudaDevAttrWarpSize: *value = 32; break;
    case cudaDevAttrMaxGridDimX: *value = int(kMaxGridX); break;
    case cudaDevAttrMaxGridDimY:
    case cudaDevAttrMaxGridDimZ: *value = int(kMaxGridYz); break;
    default: return keep(cudaErrorInvalidValue);
  }
  return cudaSuccess;
}

// One block per multiprocessor is always right, if not the most.
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, const void*, int, size_t) {
  return *blocks = 1, cudaSuccess;
}
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int* blocks, const void*, int, size_t, unsigned) {
  return *blocks = 1, cudaSuccess;
}

}  // extern "C"
