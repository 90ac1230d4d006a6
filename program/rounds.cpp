#include "lockstep/program/rounds.h"

#include <filesystem>
#include <iostream>
#include <memory>
#include <optional>
#include <stdexcept>

#include <c10/util/Exception.h>

#include "lockstep/core/check.h"
#include "lockstep/core/counted.h"
#include "lockstep/parallel_state/failure_reason.h"
#include "lockstep/parallel_state/job_secret.h"
#include "lockstep/parallel_state/launch_channel.h"
#include "lockstep/parallel_state/rank_message.h"
#include "lockstep/program/commands.h"
#include "lockstep/program/rank_failure.h"
#include "lockstep/program/rank_process.h"
#include "lockstep/program/signals.h"
#include "lockstep/training/elastic_layouts.h"
#include "lockstep/training/run_setup.h"

namespace lockstep {
namespace {

constexpr int kStatusOfStop = 3;

/// libtorch also throws for memory whose values another rank would have sent.
bool is_of_communication(const std::exception& error, const ParallelState* state) {
  if (dynamic_cast<const CommunicationError*>(&error) != nullptr) return true;
  if (!state || dynamic_cast<const c10::Error*>(&error) == nullptr) return false;
  try {
    state->check_failures();
    return false;
  } catch (const CommunicationError&) {
    return true;
  }
}

/// Copies in memory help only ranks that stay.
void check_replicas_in_memory(const Config& config, bool stays, int64_t world_size) {
  const int64_t replicas = config.checkpoint.in_memory_replicas;
  if (replicas == 0) return;
  require<ConfigError>(stays,
                       "checkpoint.in_memory_replicas: found {}, allowed without `lockstep launch` "
                       "on one host: 0, because no rank survives a loss",
                       replicas);
  require<ConfigError>(replicas < world_size,
                       "checkpoint.in_memory_replicas: found {} with {}, allowed: fewer than the "
                       "ranks",
                       replicas, counted(world_size, "rank"));
}

class Rounds {
 public:
  Rounds(Config config, std::string folder, const std::function<void(const Round&)>& train)
      : config_(std::move(config)),
        folder_(std::move(folder)),
        train_(train),
        environment_(read_launch_environment()),
        start_(read_job_start()) {
    if (config_.train.elastic == Elastic::dp) channel_ = LaunchChannel::of_this_process();
    is_spare_ = channel_ && LaunchChannel::spare_of() > 0;
    first_world_size_ = is_spare_ ? LaunchChannel::spare_of() : environment_.world_size;
    if (config_.train.elastic == Elastic::dp)
      keep_global_batch(config_, first_world_size_, folder_, start_before_meeting());
    check_replicas_in_memory(config_, channel_ != nullptr, first_world_size_);
    check_layout(config_, first_world_size_);
    device_ = choose_device(config_.train.device,
                            channel_ ? LaunchChannel::in_slot(environment_) : environment_);
  }

  void run() {
    if (channel_)
      channel_->announce(*parallel_options(config_, device_).timeout, absolute_folder());
    if (is_spare_) take_next_order();
    while (const auto lost = lost_in_round()) {
      std::cerr << fmt::format("lockstep: {}; this rank keeps running\n",
                               told_by_rank(environment_.rank, *lost))
                << std::flush;
      take_next_order();
    }
  }

 private:
  /// With a store of torchrun's agent the ranks know only after they have met whether it is a
  /// restart. They look for the job's checkpoints in any case: a first start finds none.
  JobStart start_before_meeting() const {
    JobStart start = start_;
    if (environment_.agent_serves_store) start.restarts = 1;
    return start;
  }
  /// Why the round ended, if another can begin; unset when training is over.
  std::optional<std::string> lost_in_round() {
    std::unique_ptr<ParallelState> state;
    try {
      (void)read_job_secret();  // one rank alone refuses what several refuse when they meet
      ParallelStateOptions options = parallel_options(config_, device_);
      if (channel_) options.meeting_obstacle = [this] { return channel_->round_is_over(); };
      state = std::make_unique<ParallelState>(environment_, std::move(options));
      train_({config_, *state, with_earlier_rounds(start_, state->earlier_rounds()), copies_});
      return std::nullopt;
    } catch (const std::exception& error) {
      if (state) state->post_failure(error.what());
      const bool may_stay = channel_ && environment_.world_size > 1;
      if (may_stay && is_of_communication(error, state.get())) {
        state.reset();  // what waits on the device for other ranks is aborted
        check_own_device();
        return reason_of(error);
      }
      if (environment_.world_size == 1) throw;
      throw failure_of_rank(environment_.rank, error);
    }
  }

  /// An error of the device makes operations fail like a lost rank, but this process cannot go on.
  void check_own_device() const {
    if (const auto error = error_of_device(device_))
      throw failure_of_rank(environment_.rank, std::runtime_error(*error));
  }

  void take_next_order() {
    note_sigterm();  // the end of a run ignores signals
    note_signals_only_beside(channel_->descriptor());
    if (is_spare_) forget_noted_signal();
    const LaunchOrder order = channel_->wait_for_order(
        {fitting_world_sizes(config_, first_world_size_), limits_of_world_size(config_),
         format_held_copies(copies_.held())},
        note_all_signals);
    if (order.status) end(*order.status, order.reason);
    is_spare_ = false;
    const EnvironmentReader read = over(order.round, environment_of_process());
    environment_ = read_launch_environment(read);
    start_ = read_job_start(read);
  }

  std::string absolute_folder() const {
    return folder_.empty() ? "" : std::filesystem::absolute(folder_).string();
  }

  [[noreturn]] void end(int status, const std::string& reason) const {
    if (reason.empty() || is_spare_) throw ExitStatus{status, ""};
    const char* const what = status == kStatusOfStop ? "the run ends: "
                                                     : "the run cannot "
                                                       "continue: ";
    throw ExitStatus{status, told_by_rank(environment_.rank,
                                          what + reason + "; " + newest_checkpoint_in(folder_))};
  }

  Config config_;
  std::string folder_;
  const std::function<void(const Round&)>& train_;
  LaunchEnvironment environment_;
  JobStart start_;
  c10::Device device_ = c10::kCPU;
  StateCopies copies_;
  std::unique_ptr<LaunchChannel> channel_;  ///< null: no round follows a lost rank
  bool is_spare_ = false;                   ///< until its first order
  int64_t first_world_size_ = 0;            ///< no round has more ranks
};

}  // namespace

void run_rounds(Config config, const std::string& folder,
                const std::function<void(const Round&)>& train) {
  // c10d's threads log there, and would flush std::cout, which another thread may be writing.
  std::cerr.tie(nullptr);
  Rounds(std::move(config), folder, train).run();
}

}  // namespace lockstep
