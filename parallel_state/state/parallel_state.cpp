#include "lockstep/parallel_state/parallel_state.h"

#include <algorithm>
#include <csignal>
#include <map>
#include <mutex>
#include <numeric>

#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include "lockstep/core/check.h"
#include "lockstep/core/text_digest.h"
#include "lockstep/parallel_state/announcement.h"
#include "lockstep/parallel_state/backends.h"
#include "lockstep/parallel_state/c10d_transport.h"
#include "lockstep/parallel_state/cpu_transport.h"
#include "lockstep/parallel_state/desync_check.h"
#include "lockstep/parallel_state/failure_board.h"
#include "lockstep/parallel_state/gathering.h"
#include "lockstep/parallel_state/operation.h"
#include "lockstep/parallel_state/planned_rank.h"
#include "lockstep/parallel_state/planning_backend.h"
#include "lockstep/parallel_state/planning_transport.h"
#include "lockstep/parallel_state/process_group_state.h"
#include "lockstep/parallel_state/rendezvous.h"

namespace lockstep {
namespace {

/// c10d's own watchdog names no rank, so it acts only after DeviceWatch.
constexpr std::chrono::seconds kWatchdogDelay(60);

/// The backend of tensors on options.device.
c10::intrusive_ptr<c10d::Backend> device_backend(const BackendSpec& spec,
                                                 const ParallelStateOptions& options) {
  BackendSpec patient = spec;
  patient.timeout += kWatchdogDelay;
  if (options.device_backend_factory)
    return options.device_backend_factory(patient, options.device);
  require<ConfigError>(options.device.is_cuda(),
                       "group {}: found device {}, allowed: cpu, cuda, or others with a "
                       "device_backend_factory",
                       spec.group_name, options.device.str());
  return make_nccl_backend(patient);
}

/// The c10d group behind `spec`: always Gloo for host data, plus the device's backend.
c10::intrusive_ptr<c10d::ProcessGroup> connect(const BackendSpec& spec,
                                               const ParallelStateOptions& options) {
  using Type = c10d::ProcessGroup::BackendType;
  auto group = c10::make_intrusive<c10d::ProcessGroup>(spec.store, spec.rank,
                                                       static_cast<int>(spec.ranks.size()));
  const bool on_device = !options.device.is_cpu() && !options.device.is_meta();
  const Type device_type = options.device.is_cuda() ? Type::NCCL : Type::CUSTOM;
  group->setBackend(
      c10::kCPU, Type::GLOO,
      options.backend_factory ? options.backend_factory(spec) : make_gloo_backend(spec));
  if (on_device) {
    group->setBoundDeviceId(options.device);
    group->setBackend(options.device.type(), device_type, device_backend(spec, options));
  }
  group->setDefaultBackend(on_device ? device_type : Type::GLOO);
  group->setGroupName(spec.group_name);
  return group;
}

/// Gloo writes to the socket of a peer that has died. The signal would end the process silently; if
/// it is ignored, the write fails and becomes a CommunicationError.
void ignore_broken_pipes() {
  struct sigaction action = {};
  if (::sigaction(SIGPIPE, nullptr, &action) != 0 || action.sa_handler != SIG_DFL) return;
  action.sa_handler = SIG_IGN;
  ::sigaction(SIGPIPE, &action, nullptr);
}

/// For the calling thread: the device of allocations and launches without a tensor that names one.
void make_current(c10::Device device) {
  c10::impl::getDeviceGuardImpl(device.type())->setDevice(device);
}

void check_timeout(std::chrono::milliseconds timeout, const std::string& group = "") {
  constexpr std::chrono::hours kLongest(24 * 365 * 100);
  require<ConfigError>(timeout.count() > 0 && timeout <= kLongest,
                       "{}timeout: found {} ms, allowed: 1 ms to 100 years", group,
                       timeout.count());
}

/// Sets the timeout if it is unset.
void check_options(ParallelStateOptions& options, int64_t rank) {
  if (!options.timeout) options.timeout = std::chrono::seconds(options.device.is_cuda() ? 600 : 60);
  check_timeout(*options.timeout);
  require<ConfigError>(!options.device.is_cuda() || options.device.has_index(),
                       "device: found 'cuda', allowed: one with its number, such as 'cuda:0'");
  for (const auto& [kind, of_group] : options.group_options)
    if (of_group.timeout) check_timeout(*of_group.timeout, fmt::format("{}: ", to_string(kind)));
  const int64_t world = RankGrids(options.sizes).sizes().world_size;  // checks them
  require<ConfigError>(rank >= 0 && rank < world, "rank {} is outside the world of {} ranks", rank,
                       world);
}

}  // namespace

struct ParallelState::Impl {
  /// The key that tells communicators apart.
  struct Key {
    RankList ranks;
    GroupOptions options = {};
    bool for_all_gather = false;
    auto operator<=>(const Key&) const = default;
  };

  /// If the rank fails before the meeting, the others learn why.
  static std::shared_ptr<Impl> make(std::unique_ptr<Membership> in_run, int64_t rank,
                                    ParallelStateOptions options) {
    try {
      return std::make_shared<Impl>(in_run, rank, std::move(options));
    } catch (const std::exception& error) {
      if (in_run) in_run->give_up(reason_of(error));
      throw;
    }
  }

  /// Takes `in_run` when only the meeting is left to do.
  Impl(std::unique_ptr<Membership>& in_run, int64_t global_rank, ParallelStateOptions with_options)
      : store(in_run ? in_run->store() : nullptr),
        rank(global_rank),
        options(std::move(with_options)),
        grids(options.sizes),
        failures(std::make_shared<FailureBoard>(store, rank, options.sizes.world_size)),
        guard(std::make_shared<DesyncGuard>(failures, rank)),
        clock(std::make_shared<StepClock>(options.device)) {
    if (!options.device.is_cpu() && !options.device.is_meta()) {
      make_current(options.device);
      watch = std::make_shared<DeviceWatch>(failures, options.device);
    }
    membership = std::move(in_run);
    if (membership) membership->meet();
  }
  ~Impl() {
    if (watch) watch->finish();
    guard->say_end();
  }
  Impl(const Impl&) = delete;
  Impl& operator=(const Impl&) = delete;

  ProcessGroup group(const std::string& name, Key key) {
    auto state = std::make_shared<ProcessGroup::State>();
    state->name = name;
    state->global_rank = rank;
    state->rank = std::find(key.ranks.begin(), key.ranks.end(), rank) - key.ranks.begin();
    state->timeout = key.options.timeout.value_or(*options.timeout);
    state->failures = failures;
    state->guard = guard;
    state->observer = options.observer;
    state->watch = watch;
    state->device = options.device;
    state->clock = clock;
    state->recorder = recorder;
    if (key.ranks.size() > 1) state->communicator = communicator(*state, key);
    state->ranks = std::move(key.ranks);
    ProcessGroup made(std::move(state));
    note_connected(made);
    return made;
  }

  std::shared_ptr<Communicator> communicator(const ProcessGroup::State& state, const Key& key) {
    const std::lock_guard<std::mutex> lock(mutex);
    auto& entry = communicators[key];
    if (entry) return entry;
    ignore_broken_pipes();
    const TransportMaker make = cpu_transport_maker();
    BackendSpec spec;
    spec.group_name = fmt::format("{}{}", state.name, key.ranks);
    const std::string apart =
        fmt::format("{} {}", to_string(key.options), key.for_all_gather ? "all-gather" : "");
    const std::string identity = fmt::format("{} {}", key.ranks, apart);
    spec.store = c10::make_intrusive<c10d::PrefixStore>(
        fmt::format("group/{:016x}", text_digest(identity)), store);
    spec.ranks = key.ranks;
    spec.rank = static_cast<int>(state.rank);
    spec.timeout = state.timeout;
    spec.single_host = options.single_host;
    spec.options = key.options;
    await_members(spec);
    try {
      const Connecting connecting(store);
      const auto c10d = connect(spec, options);
      entry =
          std::make_shared<Communicator>(c10d, make(c10d, state.timeout), device_transport(c10d),
                                         guard->ledger(identity), failures);
      entry->transport(c10::kCPU).greet();
      if (watch) watch->include(entry);
      if (recorder) recorder->on_connect(*entry, state.name, key.ranks, apart);
    } catch (const std::exception& error) {
      entry = nullptr;
      const auto posted = failures->find();
      fail_to_connect(spec, posted ? posted->text() : reason_of(error));
    }
    return entry;
  }

  /// The transport of CPU tensors. A planning rank, which meets no other, uses its backend.
  TransportMaker cpu_transport_maker() const {
    if (membership) return cpu_transport(/*observed=*/options.backend_factory != nullptr);
    return [](const auto& c10d, std::chrono::milliseconds /*timeout*/) {
      return std::make_unique<C10dTransport>(c10d, c10::kCPU);
    };
  }

  std::unique_ptr<Transport> device_transport(
      const c10::intrusive_ptr<c10d::ProcessGroup>& c10d) const {
    if (options.device.is_cpu()) return nullptr;
    if (options.device.is_meta()) return std::make_unique<PlanningTransport>();
    return std::make_unique<C10dTransport>(c10d, options.device);
  }

  /// Connecting cannot be interrupted, so it starts once all members want it.
  void await_members(const BackendSpec& spec) const {
    if (!membership) return;
    std::optional<std::string> absent;
    try {
      absent =
          gather(*spec.store, spec.ranks, rank, std::chrono::steady_clock::now() + spec.timeout,
                 [&] { return failures->find_obstacle(spec.ranks); });
    } catch (const c10::Error& error) {
      absent = reason_of(error);
    }
    if (absent) fail_to_connect(spec, *absent);
  }

  [[noreturn]] void fail_to_connect(const BackendSpec& spec, const std::string& reason) const {
    const auto [culprit, cause, difference, failed] =
        guard->explain(spec.ranks, nullptr, "connecting group " + spec.group_name, reason);
    const std::string end =
        fmt::format("group {} could not be connected on rank {} within {:.1f} s", spec.group_name,
                    rank, static_cast<double>(spec.timeout.count()) / 1e3);
    if (!failed.empty()) fail<CommunicationError>("{}; so {}", failed, end);
    fail<CommunicationError>("{}{}{}{}", culprit, culprit.empty() ? "" : ": ", end,
                             cause == culprit ? "" : ": " + cause);
  }

  /// Keeps one group for each communicator.
  void note_connected(const ProcessGroup& made) {
    const auto& communicator = made.shared_state()->communicator;
    if (!communicator) return;
    const std::lock_guard<std::mutex> lock(mutex);
    const bool known = std::any_of(connected.begin(), connected.end(), [&](auto& group) {
      return group.shared_state()->communicator == communicator;
    });
    if (!known) connected.push_back(made);
  }

  GroupOptions options_of(GroupKind kind) const {
    const auto found = options.group_options.find(kind);
    return found == options.group_options.end() ? GroupOptions() : found->second;
  }

  RankList ranks_of(GroupKind kind) const {
    RankList ranks = grids.group_of(kind, rank);
    require<UsageError>(!ranks.empty(), "rank {} is in no group of kind {}", rank, to_string(kind));
    return ranks;
  }

  std::unique_ptr<Membership> membership;  ///< destroyed last: groups end before check-out
  c10::intrusive_ptr<c10d::Store> store;
  int64_t rank;
  ParallelStateOptions options;
  RankGrids grids;
  std::shared_ptr<FailureBoard> failures;
  std::shared_ptr<DesyncGuard> guard;
  std::shared_ptr<StepClock> clock;
  std::shared_ptr<DeviceWatch> watch;         ///< null on the CPU
  std::shared_ptr<ProgramRecorder> recorder;  ///< of a planning rank; may be null
  std::mutex mutex;
  std::map<Key, std::shared_ptr<Communicator>> communicators;
  std::vector<ProcessGroup> connected;  ///< one for each communicator
};

ParallelState ParallelState::single_process(c10::Device device) {
  return ParallelState(nullptr, 0, {.device = device});
}

ParallelState ParallelState::planning_rank(const ParallelSizes& sizes, int64_t rank,
                                           CollectiveObserver observer) {
  const auto* const planned = observer.target<PlannedRank>();
  ParallelStateOptions options = planned ? planned->options : ParallelStateOptions();
  options.sizes = sizes;
  options.observer = planned ? nullptr : std::move(observer);
  options.backend_factory = make_planning_backend;
  check_options(options, rank);
  auto impl = Impl::make(nullptr, rank, std::move(options));
  if (planned) impl->recorder = planned->recorder;
  return ParallelState(std::move(impl));
}

ParallelState::ParallelState(const LaunchEnvironment& environment, ParallelStateOptions options) {
  options.sizes.world_size = environment.world_size;
  options.single_host = environment.single_host();
  options.run_id = environment.run_id;
  check_options(options, environment.rank);  // before any connection
  auto membership = join_run(environment, membership_spec(options, environment.rank));
  impl_ = Impl::make(std::move(membership), environment.rank, std::move(options));
}

ParallelState::ParallelState(const c10::intrusive_ptr<c10d::Store>& store, int64_t rank,
                             ParallelStateOptions options) {
  const int64_t world = options.sizes.world_size;
  check_options(options, rank);
  require<ConfigError>(world == 1 || store, "a world of {} ranks needs a store", world);
  std::unique_ptr<Membership> membership;
  if (world > 1) membership = join_run(store, membership_spec(options, rank));
  impl_ = Impl::make(std::move(membership), rank, std::move(options));
}

int64_t ParallelState::rank() const { return impl_->rank; }
int64_t ParallelState::world_size() const { return impl_->options.sizes.world_size; }
c10::Device ParallelState::device() const { return impl_->options.device; }
const RankGrids& ParallelState::grids() const { return impl_->grids; }

std::optional<int64_t> ParallelState::earlier_rounds() const {
  return impl_->membership ? impl_->membership->round() : std::nullopt;
}

ProcessGroup ParallelState::group(GroupKind kind) const {
  return impl_->group(to_string(kind), {impl_->ranks_of(kind), impl_->options_of(kind)});
}

ProcessGroup ParallelState::all_gather_group(GroupKind kind) const {
  require<UsageError>(kind == GroupKind::dp_cp || kind == GroupKind::expert_dp,
                      "all-gather group of kind {}, allowed: dp-cp, expert-dp", to_string(kind));
  if (!impl_->options.create_all_gather_groups) return group(kind);
  return impl_->group(std::string(to_string(kind)) + " all-gather",
                      {impl_->ranks_of(kind), impl_->options_of(kind), true});
}

ProcessGroup ParallelState::world() const {
  RankList ranks(static_cast<size_t>(world_size()));
  std::iota(ranks.begin(), ranks.end(), 0);
  return impl_->group("world", {std::move(ranks)});
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
  return impl_->group(name, {std::move(ranks)});
}

void ParallelState::begin_step(int64_t step) const { impl_->guard->set_step(step); }
const std::shared_ptr<StepClock>& ParallelState::step_clock() const { return impl_->clock; }

void ParallelState::check_in_step() const {
  std::vector<ProcessGroup> groups;
  {
    const std::lock_guard<std::mutex> lock(impl_->mutex);
    groups = impl_->connected;
  }
  lockstep::check_in_step(groups);
}

void ParallelState::check_failures() const {
  if (impl_->watch) impl_->watch->check();
  require<CommunicationError>(!impl_->guard->has_failed(), "an operation over a group has failed");
}

void ParallelState::post_failure(const std::string& message) const noexcept {
  impl_->failures->post(message);
}

std::optional<std::string> ParallelState::lost_launcher() const {
  return impl_->failures->lost_launcher();
}

}  // namespace lockstep
