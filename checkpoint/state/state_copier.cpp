#include "lockstep/checkpoint/state_copier.h"

#include <unistd.h>

#include <algorithm>
#include <array>
#include <set>

#include <ATen/ATen.h>

#include "lockstep/checkpoint/state_share.h"
#include "lockstep/core/config_io.h"
#include "lockstep/core/integers.h"
#include "lockstep/parallel_state/collectives.h"

namespace lockstep {
namespace {

constexpr const char* kOf = "a part of the state in memory";

std::string host_name() {
  std::array<char, 256> name = {};
  ::gethostname(name.data(), name.size() - 1);
  return name.data();
}

}  // namespace

/// The plan that all copies of a round share.
struct StateCopier::Plan {
  /// The n-th copies of some parts, that this rank keeps, in one piece of memory.
  struct Kept {
    std::vector<int64_t> ranks;  ///< whose parts they are, ascending
    int64_t bytes = 0;
    std::vector<int64_t> output_rows, input_rows;  ///< of all_to_all()
  };

  std::vector<size_t> share;                              ///< indices of this rank's tensors
  std::vector<int64_t> offsets;                           ///< their offsets in the part, in bytes
  std::vector<std::shared_ptr<const Manifest>> contents;  ///< of the ranks whose parts are kept
  std::vector<Kept> replicas;
  std::string config;
};

StateCopier::StateCopier(const ParallelState& parallel_state, StateCopies& into, int64_t replicas,
                         int64_t round)
    : state_(parallel_state),
      into_(into),
      replicas_(std::min(replicas, parallel_state.world_size() - 1)),
      round_(round) {}

StateCopier::~StateCopier() = default;

std::string StateCopier::own_content(const std::vector<StateTensor>& tensors) const {
  Manifest content;
  for (size_t i = 0; i < plan_->share.size(); ++i) {
    const StateTensor& tensor = tensors.at(plan_->share[i]);
    content.tensors.push_back({tensor.name,
                               tensor.state,
                               safetensors_dtype(tensor.values.scalar_type()),
                               tensor.part.box.shape,
                               {{0, plan_->offsets[i], tensor.part}}});
  }
  const int64_t size = plan_->offsets.back();
  if (size > 0)
    content.files.push_back(
        {fmt::format("part_{}", state_.rank()), size,
         std::vector<uint32_t>(static_cast<size_t>(ceil_div(size, kChecksumBlock)), 0)});
  return format_manifest(content);
}

void StateCopier::make_plan(const std::vector<StateTensor>& tensors, const Config& config) {
  plan_ = std::make_shared<Plan>();
  plan_->config = print_config(config);
  plan_->share = share_of_rank(tensors, state_);
  plan_->offsets = {0};
  for (const size_t i : plan_->share)
    plan_->offsets.push_back(
        plan_->offsets.back() +
        round_up(static_cast<int64_t>(tensors.at(i).values.nbytes()), kShareAlignment));
  std::vector<std::string> hosts;
  for (const std::string& text :
       all_gather_texts(state_.world(), host_name() + "\n" + own_content(tensors), kOf)) {
    const size_t end = text.find('\n');
    hosts.push_back(text.substr(0, end));
    plan_->contents.push_back(
        std::make_shared<Manifest>(parse_manifest_part(text.substr(end + 1), kOf)));
  }
  const auto holders = copy_holders(hosts, replicas_);
  const auto rank = static_cast<size_t>(state_.rank());
  const auto bytes_of = [&](size_t part) { return CopiedPart::all_bytes(*plan_->contents[part]); };
  for (size_t n = 0; n < static_cast<size_t>(replicas_); ++n) {
    Plan::Kept kept;
    kept.output_rows.resize(hosts.size());
    kept.input_rows.resize(hosts.size());
    kept.input_rows[static_cast<size_t>(holders[rank][n])] = bytes_of(rank);
    for (size_t other = 0; other < hosts.size(); ++other) {
      if (holders[other][n] != state_.rank()) continue;
      kept.ranks.push_back(static_cast<int64_t>(other));
      kept.output_rows[other] = bytes_of(other);
      kept.bytes += bytes_of(other);
    }
    plan_->replicas.push_back(std::move(kept));
  }
  forget_others();
}

void StateCopier::forget_others() const {
  std::set<int64_t> kept = {state_.rank()};
  for (const Plan::Kept& replica : plan_->replicas)
    kept.insert(replica.ranks.begin(), replica.ranks.end());
  for (size_t rank = 0; rank < plan_->contents.size(); ++rank)
    if (!kept.contains(static_cast<int64_t>(rank))) plan_->contents[rank].reset();
}

void StateCopier::prepare(StateCopy& copy) const {
  if (copy.made_for == plan_) return;
  copy.parts.clear();
  copy.made_for = plan_;
  copy.config = plan_->config;
  const auto& own = plan_->contents[static_cast<size_t>(state_.rank())];
  copy.parts[state_.rank()] = {own, host_memory(CopiedPart::all_bytes(*own), state_.device())};
  for (const Plan::Kept& kept : plan_->replicas) {
    const at::Tensor memory = host_memory(kept.bytes, c10::kCPU);
    int64_t begin = 0;
    for (const int64_t rank : kept.ranks) {
      const auto& content = plan_->contents[static_cast<size_t>(rank)];
      const int64_t bytes = CopiedPart::all_bytes(*content);
      copy.parts[rank] = {content, memory.narrow(0, begin, bytes)};
      begin += bytes;
    }
  }
}

/// Waits for the copy from a device: it must have ended before the checksums are taken.
void StateCopier::fill(const CopiedPart& own, const std::vector<StateTensor>& tensors) const {
  const at::NoGradGuard no_grad;
  for (size_t i = 0; i < plan_->share.size(); ++i) {
    const at::Tensor values = tensors.at(plan_->share[i]).values.detach();
    at::from_blob(static_cast<char*>(own.bytes.data_ptr()) + plan_->offsets[i], values.sizes(),
                  at::TensorOptions(values.scalar_type()))
        .copy_(values);
  }
}

void StateCopier::copy(const std::vector<StateTensor>& tensors, const TrainingProgress& progress,
                       const Config& config) {
  if (!plan_) make_plan(tensors, config);
  StateCopy& copy = into_.begin(next());
  ++number_;
  prepare(copy);
  copy.whole = manifest_of(progress, config, state_, /*job_id=*/"");
  CopiedPart& own = copy.parts.at(state_.rank());
  fill(own, tensors);
  own.seal(progress.metrics_checksum);
  own.is_whole = true;
  for (const Plan::Kept& kept : plan_->replicas) {
    at::Tensor memory = at::empty({0}, at::kByte);
    if (!kept.ranks.empty())
      memory = copy.parts.at(kept.ranks.front()).bytes.as_strided({kept.bytes}, {1});
    all_to_all(state_.world(), memory, own.bytes, kept.output_rows, kept.input_rows, kOf).wait();
    for (const int64_t rank : kept.ranks) copy.parts.at(rank).is_whole = true;
  }
}

}  // namespace lockstep
