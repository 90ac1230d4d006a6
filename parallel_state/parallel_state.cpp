#include "lockstep/parallel_state/parallel_state.h"

#include <algorithm>
#include <csignal>
#include <cstdlib>
#include <map>
#include <mutex>
#include <numeric>

#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include "lockstep/core/check.h"
#include "lockstep/parallel_state/backends.h"
#include "lockstep/parallel_state/failure_board.h"
#include "lockstep/parallel_state/process_group_state.h"
#include "lockstep/parallel_state/rendezvous.h"

namespace lockstep {
namespace {

/// The c10d group behind `spec`: Gloo for host data always, NCCL beside it on CUDA.
c10::intrusive_ptr<c10d::ProcessGroup> connect(const BackendSpec& spec,
                                               const ParallelStateOptions& options) {
  using Type = c10d::ProcessGroup::BackendType;
  auto group = c10::make_intrusive<c10d::ProcessGroup>(spec.store, spec.rank,
                                                       static_cast<int>(spec.ranks.size()));
  const bool cuda = options.device.is_cuda();
  group->setBackend(
      c10::kCPU, Type::GLOO,
      options.backend_factory ? options.backend_factory(spec) : make_gloo_backend(spec));
  if (cuda) group->setBackend(c10::kCUDA, Type::NCCL, make_nccl_backend(spec, options.device));
  group->setDefaultBackend(cuda ? Type::NCCL : Type::GLOO);
  group->setGroupName(spec.group_name);
  return group;
}

/// Gloo writes to the socket of a peer that has died. The signal would end the process without a
/// word; ignored, the write fails and becomes a CommunicationError.
void ignore_broken_pipes() {
  struct sigaction action = {};
  if (::sigaction(SIGPIPE, nullptr, &action) != 0 || action.sa_handler != SIG_DFL) return;
  action.sa_handler = SIG_IGN;
  ::sigaction(SIGPIPE, &action, nullptr);
}

}  // namespace

struct ParallelState::Impl {
  Impl(c10::intrusive_ptr<c10d::Store> shared_store, int64_t global_rank,
       ParallelStateOptions with_options)
      : store(std::move(shared_store)),
        rank(global_rank),
        options(std::move(with_options)),
        grids(options.sizes),
        failures(std::make_shared<FailureBoard>(store, rank)) {
    const int64_t world = options.sizes.world_size;
    require<ConfigError>(rank >= 0 && rank < world, "rank {} is outside the world of {} ranks",
                         rank, world);
    require<ConfigError>(world == 1 || store, "a world of {} ranks needs a store", world);
  }

  ProcessGroup group(const std::string& name, RankList ranks) {
    auto state = std::make_shared<ProcessGroup::State>();
    state->name = name;
    state->global_rank = rank;
    state->rank = std::find(ranks.begin(), ranks.end(), rank) - ranks.begin();
    state->timeout = options.timeout;
    state->failures = failures;
    if (ranks.size() > 1) state->c10d = communicator(name, ranks, state->rank);
    state->ranks = std::move(ranks);
    return ProcessGroup(std::move(state));
  }

  c10::intrusive_ptr<c10d::ProcessGroup> communicator(const std::string& name,
                                                      const RankList& ranks, int64_t position) {
    const std::lock_guard<std::mutex> lock(mutex);
    auto& entry = communicators[ranks];
    if (entry) return entry;
    ignore_broken_pipes();
    BackendSpec spec;
    spec.group_name = fmt::format("{}{}", name, ranks);
    spec.store = c10::make_intrusive<c10d::PrefixStore>(fmt::format("group/{}", ranks), store);
    spec.ranks = ranks;
    spec.rank = static_cast<int>(position);
    spec.timeout = options.timeout;
    spec.single_host = options.single_host;
    try {
      entry = connect(spec, options);
    } catch (const c10::Error& error) {
      communicators.erase(ranks);
      const auto posted = failures->find();
      fail<CommunicationError>("group {} could not be connected on rank {} within {:.1f} s: {}",
                               spec.group_name, rank, options.timeout.count() / 1e3,
                               posted ? *posted : error.what_without_backtrace());
    }
    return entry;
  }

  c10::intrusive_ptr<c10d::Store> store;
  int64_t rank;
  ParallelStateOptions options;
  RankGrids grids;
  std::shared_ptr<const FailureBoard> failures;
  std::mutex mutex;
  std::map<RankList, c10::intrusive_ptr<c10d::ProcessGroup>> communicators;
};

ParallelState ParallelState::single_process(c10::Device device) {
  ParallelStateOptions options;
  options.device = device;
  return ParallelState(nullptr, 0, std::move(options));
}

ParallelState::ParallelState(const LaunchEnvironment& environment, ParallelStateOptions options) {
  options.sizes.world_size = environment.world_size;
  options.single_host = environment.single_host();
  const RankGrids check(options.sizes);  // before anything is connected
  auto store = connect_store(environment, options.timeout);
  impl_ = std::make_shared<Impl>(std::move(store), environment.rank, std::move(options));
}

ParallelState::ParallelState(const c10::intrusive_ptr<c10d::Store>& store, int64_t rank,
                             ParallelStateOptions options)
    : impl_(std::make_shared<Impl>(store, rank, std::move(options))) {}

int64_t ParallelState::rank() const { return impl_->rank; }

int64_t ParallelState::world_size() const { return impl_->options.sizes.world_size; }

c10::Device ParallelState::device() const { return impl_->options.device; }

const RankGrids& ParallelState::grids() const { return impl_->grids; }

ProcessGroup ParallelState::group(GroupKind kind) const {
  RankList ranks = impl_->grids.group_of(kind, rank());
  require<UsageError>(!ranks.empty(), "rank {} is in no group of kind {}", rank(), to_string(kind));
  return impl_->group(to_string(kind), std::move(ranks));
}

ProcessGroup ParallelState::world() const {
  RankList ranks(static_cast<size_t>(world_size()));
  std::iota(ranks.begin(), ranks.end(), 0);
  return impl_->group("world", std::move(ranks));
}

ProcessGroup ParallelState::group_of_ranks(const std::string& name, RankList ranks) const {
  RankList sorted = ranks;
  std::sort(sorted.begin(), sorted.end());
  require<UsageError>(
      !sorted.empty() && sorted.front() >= 0 && sorted.back() < world_size() &&
          std::adjacent_find(sorted.begin(), sorted.end()) == sorted.end() &&
          std::binary_search(sorted.begin(), sorted.end(), rank()),
      "group {}: found ranks {}, allowed: different ranks from 0 to {}, rank {} among them", name,
      ranks, world_size() - 1, rank());
  return impl_->group(name, std::move(ranks));
}

void ParallelState::post_failure(const std::string& message) const noexcept {
  impl_->failures->post(message);
}

void prepare_rank_threads() { ::setenv("TORCH_FR_BUFFER_SIZE", "0", /*overwrite=*/0); }

}  // namespace lockstep
