// Launching without the angle brackets, so that a plain C++ compiler can read the sources, too.
#pragma once
#include <cuda_runtime.h>

namespace vq {

template <typename... Parameters, typename... Given>
int launch(void (*kernel)(Parameters...), dim3 grid, int threads, int shared_bytes, void* stream, const Given&... arguments) {
    cudaLaunchConfig_t config = {};
    config.gridDim = grid;
    config.blockDim = dim3(threads);
    config.dynamicSmemBytes = shared_bytes;
    config.stream = static_cast<cudaStream_t>(stream);
    return cudaLaunchKernelEx(&config, kernel, arguments...);
}

}  // namespace vq
