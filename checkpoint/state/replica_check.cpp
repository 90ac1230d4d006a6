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

/// The fingerprint of a rank that holds nothing: the lowest, so that it never decides a maximum.
constexpr int64_t kNothing = std::numeric_limits<int64_t>::min();

std::string describe(const StateTensor& tensor) {
  return tensor.state.empty() ? fmt::format("'{}'", tensor.name)
                              : fmt::format("{} of '{}'", tensor.state, tensor.name);
}

/// "rank 2", "ranks 0, 1"
std::string list_ranks(const std::vector<int64_t>& ranks) {
  return fmt::format("rank{} {}", ranks.size() == 1 ? "" : "s", fmt::join(ranks, ", "));
}

/// Says which of the ranks that hold copies differ; `ranks_of` lists the ranks by fingerprint.
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
    return fmt::format("{}, and there is no majority", fmt::join(each, ", "));
  }
  for (const auto& [value, ranks] : ranks_of)
    if (ranks != most) others.insert(others.end(), ranks.begin(), ranks.end());
  std::sort(others.begin(), others.end());
  return fmt::format("{} differ{} from {}", list_ranks(others), others.size() == 1 ? "s" : "",
                     list_ranks(most));
}

/// Reads the fingerprints on a device together. Offloaded state lies on the host.
std::vector<int64_t> on_host(const std::vector<at::Tensor>& fingerprints) {
  std::vector<at::Tensor> of_device;
  for (const at::Tensor& one : fingerprints)
    if (!one.is_cpu()) of_device.push_back(one);
  const at::Tensor read = of_device.empty() ? at::Tensor() : at::stack(of_device).cpu();
  const int64_t* next = of_device.empty() ? nullptr : read.const_data_ptr<int64_t>();
  std::vector<int64_t> values;
  for (const at::Tensor& one : fingerprints)
    values.push_back(one.is_cpu() ? *one.const_data_ptr<int64_t>() : *next++);
  return values;
}

}  // namespace

ReplicaCheck::ReplicaCheck(std::vector<StateTensor> tensors, const ParallelState& state,
                           const std::set<std::string>& written)
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
    if (found != own.end()) own.erase(found);
  }
  for (const auto& [key, index] : own)
    if (const auto i = static_cast<size_t>(index); !written.contains(tensors_[i].name))
      alone_.push_back(i);
}

void ReplicaCheck::remember() {
  remembered_.clear();
  for (const size_t i : alone_) remembered_.push_back(kernels::fingerprint(tensors_[i].values));
}

void ReplicaCheck::compare(const std::string& when) {
  std::vector<at::Tensor> prints = remembered_;
  for (size_t i = 0; i < remembered_.size(); ++i)
    prints.push_back(kernels::fingerprint(tensors_[alone_[i]].values));
  for (const Shared& shared : shared_)
    if (shared.own >= 0)
      prints.push_back(kernels::fingerprint(tensors_[static_cast<size_t>(shared.own)].values));
  const std::vector<int64_t> values = on_host(prints);
  auto next = values.begin();
  const auto now = next + static_cast<std::ptrdiff_t>(remembered_.size());
  std::vector<size_t> changed;
  for (size_t i = 0; i < remembered_.size(); ++i, ++next)
    if (*next != now[static_cast<std::ptrdiff_t>(i)]) changed.push_back(alone_[i]);
  next += static_cast<std::ptrdiff_t>(remembered_.size());
  std::vector<int64_t> copies;
  for (const Shared& shared : shared_) copies.push_back(shared.own < 0 ? kNothing : *next++);
  compare_over_ranks(when, copies, changed);
}

void ReplicaCheck::compare_over_ranks(const std::string& when, const std::vector<int64_t>& copies,
                                      const std::vector<size_t>& changed) const {
  // The maximum of the values, and that of their complements: the complement of the minimum.
  const size_t count = copies.size();
  const at::Tensor extremes = at::full({2 * static_cast<int64_t>(count) + 1}, kNothing, at::kLong);
  auto* const values = extremes.mutable_data_ptr<int64_t>();
  for (size_t i = 0; i < count; ++i) {
    if (shared_[i].own < 0) continue;
    values[i] = copies[i];
    values[count + i] = ~copies[i];
  }
  values[2 * count] = static_cast<int64_t>(changed.size());
  all_reduce(state_.world(), extremes, ReduceOp::max, "fingerprints of copies").wait();
  std::vector<size_t> differing;
  for (size_t i = 0; i < count; ++i)
    if (values[i] != ~values[count + i]) differing.push_back(i);
  if (!differing.empty()) fail_for_copies(when, differing, copies[differing.front()]);
  if (values[2 * count] > 0) fail_for_changes(when, changed);
}

void ReplicaCheck::fail_for_copies(const std::string& when, const std::vector<size_t>& differing,
                                   int64_t own_of_first) const {
  const Shared& first = shared_[differing.front()];
  std::string mine;
  if (first.own >= 0)
    mine = fmt::format("{} {}", own_of_first, describe(tensors_[static_cast<size_t>(first.own)]));
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

void ReplicaCheck::fail_for_changes(const std::string& when,
                                    const std::vector<size_t>& changed) const {
  std::string mine;
  if (!changed.empty()) mine = describe(tensors_[changed.front()]);
  if (changed.size() > 1) mine += fmt::format(" (and {} others)", changed.size() - 1);
  const auto texts = all_gather_texts(state_.world(), mine, "values that changed");
  std::vector<std::string> found;
  for (size_t rank = 0; rank < texts.size(); ++rank)
    if (!texts[rank].empty()) found.push_back(fmt::format("rank {}: {}", rank, texts[rank]));
  fail<CommunicationError>("{}: values in memory changed without a write: {}", when,
                           fmt::join(found, "; "));
}

}  // namespace lockstep
