#include "lockstep/distributed/broadcast_values.h"

#include <ATen/ATen.h>

#include "lockstep/parallel_state/collectives.h"

namespace lockstep {

void broadcast_values(const ProcessGroup& group, const std::vector<at::Tensor>& tensors,
                      int64_t source, const char* label) {
  std::vector<at::Tensor> contiguous;
  for (const at::Tensor& tensor : tensors) contiguous.push_back(tensor.detach().contiguous());
  broadcast(group, contiguous, source, label).wait();
  for (size_t i = 0; i < tensors.size(); ++i)
    if (contiguous[i].data_ptr() != tensors[i].data_ptr()) tensors[i].detach().copy_(contiguous[i]);
}

}  // namespace lockstep
