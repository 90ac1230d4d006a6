#include <algorithm>

#include <ATen/ATen.h>

#include "lockstep/parallel_state/collectives.h"
#include "lockstep/parallel_state/process_group_state.h"

namespace lockstep {

std::vector<std::string> all_gather_texts(const ProcessGroup& group, const std::string& text,
                                          std::string_view label) {
  const int64_t size = static_cast<int64_t>(text.size());
  at::Tensor sizes = at::empty({group.size()}, at::kLong);
  all_gather(group, sizes, at::full({1}, size, at::kLong), label).wait();
  int64_t longest = sizes.max().item<int64_t>();
  if (const auto& recorder = group.shared_state()->recorder)
    longest = recorder->longest_text(label, longest);
  if (longest == 0) return std::vector<std::string>(static_cast<size_t>(group.size()));
  at::Tensor mine = at::zeros({longest}, at::kByte);
  std::copy(text.begin(), text.end(), mine.mutable_data_ptr<uint8_t>());
  at::Tensor all = at::empty({group.size(), longest}, at::kByte);
  all_gather(group, all, mine, label).wait();
  std::vector<std::string> texts;
  for (int64_t i = 0; i < group.size(); ++i) {
    const auto* bytes = reinterpret_cast<const char*>(all.const_data_ptr<uint8_t>() + i * longest);
    texts.emplace_back(bytes, static_cast<size_t>(sizes[i].item<int64_t>()));
  }
  return texts;
}

void barrier(const ProcessGroup& group, std::string_view label) {
  at::Tensor token = at::zeros({1}, at::kByte);
  all_reduce(group, token, ReduceOp::max, label).wait();
}

}  // namespace lockstep
