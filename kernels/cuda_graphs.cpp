#include <ATen/cuda/CUDAGraph.h>

#include "lockstep/kernels/cuda_kernels.h"

namespace lockstep::kernels {
namespace {

class CudaDeviceGraph final : public DeviceGraph {
 public:
  // Thread-local: c10d's watchdog may query events while this thread records.
  void begin_capture() override {
    graph_.capture_begin(/*pool=*/{0, 0}, cudaStreamCaptureModeThreadLocal);
  }
  void end_capture() override { graph_.capture_end(); }
  void replay() override { graph_.replay(); }

 private:
  at::cuda::CUDAGraph graph_;
};

}  // namespace

std::unique_ptr<DeviceGraph> make_cuda_graph() { return std::make_unique<CudaDeviceGraph>(); }

}  // namespace lockstep::kernels
