// Preloaded before libtorch: PyTorch counts one CUDA device as soon as tests/pretended_cuda_worker.py says so, and
// autograd starts a thread for it. Nothing is ever computed there.
extern "C" {
signed char pretended_devices = 0;
}

namespace c10 {
namespace cuda {
signed char device_count() noexcept {
  return pretended_devices;
}
}  // namespace cuda
}  // namespace c10
