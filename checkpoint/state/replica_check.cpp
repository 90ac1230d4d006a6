#include "lockstep/checkpoint/replica_check.h"

#include <algorithm>
#include <limits>
#include <map>
#include <utility>

#include <ATen/ATen.h>

#include "lockstep/checkpoint/manifest.h"
#include "lockstep/checkpoint/save_plan.h"
#include "lockstep/checkpoint/shard_file.h"
#include "lockstep/core/check.h"
#include "lockstep/kernels/fingerprint.h"
#include "lockstep/parallel_state/collectives.h"

namespace lockstep {
namespace {

/// The lowest fingerprint in the maximum of all ranks: that of a rank that holds nothing.
constexpr int64_t kNothing = std::numeric_limits<int64_t>::min();

std::string describe(const StateTensor& tensor) {
  return tensor.state.empty() ? fmt::format("'{}'", tensor.name)
                              : fmt::format("{} of '{}'", tensor.state, tensor.name);
}

/// "rank 2", "ranks 0, 1"
std::string list_ranks(const std::vector<int64_t>& ranks) {
  return fmt::format("rank{} {}", ranks.size() == 1 ? "" : "s", fmt::join(ranks, ", "));
}

/// Which of the ranks that hold copies differ, by what each holds.
std::string describe_groups(const std::map<int64_t, std::vector<int64_t>>& ranks_of,
                            size_t num_holders) {
  std::vector<int64_t> most, others;
  for (const auto& [value, ranks] : ranks_of)
    if (ranks.size() > most.size()) most = ranks;
  if (most.size() * 2 <= num_holders) {
    std::vector<std::string> each;
    for (const auto& [value, ranks] : ranks_of)
      each.push_back(fmt::format("{} {} {:016x}", list_ranks(ranks),
                                 ranks.size() == 1 ? "has" : "have", static_cast<uint64_t>(value)));
    return fmt::format("{}, and no majority tells which is right", fmt::join(each, ", "));
  }
  for (const auto& [value, ranks] : ranks_of)
    if (ranks != most) others.insert(others.end(), ranks.begin(), ranks.end());
  std::sort(others.begin(), others.end());
  return fmt::format("{} differ{} from {}", list_ranks(others), others.size() == 1 ? "s" : "",
                     list_ranks(most));
}

}  // namespace

ReplicaCheck::ReplicaCheck(std::vector<StateTensor> tensors, const ParallelState& state)
    : tensors_(std::move(tensors)), state_(state) {
  std::vector<HeldUnit> held;
  std::map<std::string, int64_t> own;
  for (size_t i = 0; i < tensors_.size(); ++i) {
    const StateTensor& tensor = tensors_[i];
    held.push_back({shard_entry_name(tensor_key(tensor.name, tensor.state), tensor.part),
                    static_cast<int64_t>(tensor.values.nbytes())});
    own[held.back().key] = static_cast<int64_t>(i);
  }
  std::vector<std::vector<HeldUnit>> of_ranks;
  for (const std::string& text :
       all_gather_texts(state.world(), format_held_units(held), "copies of the state"))
    of_ranks.push_back(parse_held_units(text));
  for (SaveUnit& unit : merge_units(of_ranks)) {
    if (unit.holders.size() < 2) continue;
    const auto found = own.find(unit.key);
    shared_.push_back({std::move(unit.holders), found == own.end() ? -1 : found->second});
  }
}

std::vector<int64_t> ReplicaCheck::fingerprints() const {
  // Those of a device are read together. State that is offloaded lies on the host.
  std::vector<at::Tensor> of_device;
  std::vector<int64_t> values;
  for (const StateTensor& tensor : tensors_) {
    const at::Tensor one = kernels::fingerprint(tensor.values);
    if (!one.is_cpu()) of_device.push_back(one);
    values.push_back(one.is_cpu() ? one.item<int64_t>() : 0);
  }
  if (of_device.empty()) return values;
  const at::Tensor read = at::stack(of_device).cpu();
  const auto* next = read.const_data_ptr<int64_t>();
  for (size_t i = 0; i < tensors_.size(); ++i)
    if (!tensors_[i].values.is_cpu()) values[i] = *next++;
  return values;
}

void ReplicaCheck::compare(const std::string& when) {
  last_ = fingerprints();
  const size_t count = shared_.size();
  if (count == 0) return;
  // The maximum of the values and of their complements, which is the complement of the minimum.
  const at::Tensor extremes = at::full({2, static_cast<int64_t>(count)}, kNothing, at::kLong);
  auto* const values = extremes.mutable_data_ptr<int64_t>();
  for (size_t i = 0; i < count; ++i) {
    if (shared_[i].own < 0) continue;
    const int64_t value = last_[static_cast<size_t>(shared_[i].own)];
    values[i] = value;
    values[count + i] = ~value;
  }
  all_reduce(state_.world(), extremes, ReduceOp::max, "fingerprints of copies").wait();
  std::vector<size_t> differing;
  for (size_t i = 0; i < count; ++i)
    if (values[i] != ~values[count + i]) differing.push_back(i);
  if (!differing.empty()) fail_for(when, differing, last_);
}

void ReplicaCheck::fail_for(const std::string& when, const std::vector<size_t>& differing,
                            const std::vector<int64_t>& own) const {
  const Shared& first = shared_[differing.front()];
  const bool holds = first.own >= 0;
  const std::string mine = holds ? fmt::format("{} {}", own[static_cast<size_t>(first.own)],
                                               describe(tensors_[static_cast<size_t>(first.own)]))
                                 : "";
  const auto texts = all_gather_texts(state_.world(), mine, "copies that differ");
  std::map<int64_t, std::vector<int64_t>> ranks_of;
  std::string name;
  for (const int64_t rank : first.holders) {
    const std::string& text = texts[static_cast<size_t>(rank)];
    ranks_of[std::stoll(text)].push_back(rank);
    name = text.substr(text.find(' ') + 1);
  }
  const std::string others =
      differing.size() == 1 ? "" : fmt::format(" (and {} others)", differing.size() - 1);
  fail<CommunicationError>("{}: copies of {}{} differ: {}", when, name, others,
                           describe_groups(ranks_of, first.holders.size()));
}

void ReplicaCheck::unchanged(const std::string& when) const {
  const std::vector<int64_t> now = fingerprints();
  std::string mine;
  size_t count = 0;
  for (size_t i = 0; i < now.size() && i < last_.size(); ++i) {
    if (now[i] == last_[i]) continue;
    if (count++ == 0) mine = describe(tensors_[i]);
  }
  const at::Tensor most = at::full({}, static_cast<int64_t>(count), at::kLong);
  all_reduce(state_.world(), most, ReduceOp::max, "values that changed").wait();
  if (most.item<int64_t>() == 0) return;
  if (count > 1) mine += fmt::format(" (and {} others)", count - 1);
  const auto texts = all_gather_texts(state_.world(), mine, "values that changed");
  std::vector<std::string> found;
  for (size_t rank = 0; rank < texts.size(); ++rank)
    if (!texts[rank].empty()) found.push_back(fmt::format("rank {}: {}", rank, texts[rank]));
  fail<CommunicationError>("{}: values in memory changed that nothing wrote: {}", when,
                           fmt::join(found, "; "));
}

}  // namespace lockstep
