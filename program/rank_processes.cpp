#include "lockstep/program/rank_processes.h"

#include <sys/wait.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <csignal>
#include <cstdio>
#include <cstring>
#include <optional>

#include "lockstep/core/check.h"
#include "lockstep/core/counted.h"
#include "lockstep/program/rank_deadlines.h"
#include "lockstep/program/rank_member.h"

namespace lockstep {
namespace {

constexpr int kFailed = 1;
constexpr int kRefused = 2, kStopped = 3, kDiverged = 4;

template <class... Arguments>
void tell(fmt::format_string<Arguments...> format, Arguments&&... arguments) {
  std::fprintf(stderr, "lockstep launch: %s\n",
               fmt::format(format, std::forward<Arguments>(arguments)...).c_str());
}

using Member = RankMember;

class Ranks {
 public:
  explicit Ranks(const LaunchedProgram& program)
      : program_(program), members_(static_cast<size_t>(program.ranks + program.spares)) {}

  int run() {
    begin_round(program_.ranks);
    start_spares();
    for (;;) {
      while (count(&Member::runs) > 0) {
        take_events();
        if (can_begin_next_round()) begin_next_round();
        if (!meets_ && !ends_ && count(&Member::trains) == 0) end_waiting(status_, "");
      }
      if (!may_start_again()) break;
      ++restarts_;
      tell("restarting all ranks (restart {} of {})", restarts_, program_.max_restarts);
      begin_round(program_.ranks);
      start_spares();
    }
    if (meets_ && !told_to_end_ && !over_)
      tell("no rank is left; {}", newest_checkpoint_in(folder_));
    return is_over() && !ends_ ? over_ : status_;
  }

 private:
  template <class Condition>
  int64_t count(Condition condition) const {
    return std::count_if(members_.begin(), members_.end(), std::mem_fn(condition));
  }
  /// Whether the run is ending: a rank has ended as all ranks of a run do. A loss counts no more.
  bool is_over() const { return over_ != 0; }
  bool may_start_again() const {
    return failed_ && !told_to_end_ && !is_over() && status_ != kRefused &&
           restarts_ < program_.max_restarts;
  }

  bool can_begin_next_round() const {
    return meets_ && count(&Member::runs) > 0 && count(&Member::trains) == 0 &&
           count(&Member::is_stopped) == 0 && !awaits_spare();
  }
  /// Whether the next round would have too few ranks without a spare that is still starting.
  bool awaits_spare() const {
    const bool starts = std::any_of(members_.begin(), members_.end(), [](const Member& member) {
      return member.starts() && !member.stopped;
    });
    return starts && restarts_ == program_.max_restarts && count(&Member::waits) < program_.ranks;
  }

  /// Gives the first `ranks` members a rank: members that wait are told, those that have ended are
  /// replaced by a new process.
  void begin_round(int ranks) {
    round_ = {.ranks = ranks, .master_port = program_.master_port, .number = rounds_++};
    if (round_.master_port == 0)
      round_.master_port = port_.emplace(program_.master_address).number();
    ends_ = failed_ = meets_ = false;
    status_ = over_ = num_lost_ = 0;
    due_ = {};
    const bool anew = count(&Member::runs) == 0;
    std::fflush(nullptr);
    for (size_t i = 0; i < members_.size(); ++i) {
      Member& member = members_[i];
      member.rank = i < static_cast<size_t>(ranks) ? static_cast<int>(i) : -1;
      if (member.rank < 0) continue;
      if (member.runs()) {
        member.waits = false;
        member.channel->give({variables_of_rank(program_, round_, member.rank), {}, ""});
      } else if (const auto obstacle = start(member, round_, member.rank)) {
        if (anew) fail_to_start(member, *obstacle);
        note_loss(fmt::format("{} cannot be started: {}", member.name(), *obstacle));
      }
    }
    if (num_lost_ > 0) begin_meeting("a rank cannot be started");
  }

  [[noreturn]] void fail_to_start(const Member& member, const std::string& obstacle) {
    send(SIGKILL);
    fail<UsageError>("launch: {} of {} cannot be started: {}", member.name(),
                     counted(program_.ranks, "rank"), obstacle);
  }

  /// Starts the missing spares.
  void start_spares() {
    RankRound round = round_;
    round.spare_of = std::exchange(round.ranks, static_cast<int>(members_.size()));
    for (int i = program_.ranks; i < round.ranks; ++i) {
      Member& spare = members_[static_cast<size_t>(i)];
      if (spare.runs()) continue;
      if (const auto obstacle = start(spare, round, i))
        tell("{} cannot be started: {}; the others keep running", spare.name(), *obstacle);
    }
  }

  /// Returns why it cannot; the member has then ended.
  std::optional<std::string> start(Member& member, const RankRound& round, int position) {
    member = {.rank = member.rank, .slot = slots_.take(), .channel = nullptr};
    std::string obstacle;
    try {
      auto channel = program_.elastic ? std::make_unique<RankChannel>() : nullptr;
      const pid_t process =
          start_rank(program_, round, position, member.slot, signals_, channel.get());
      if (process < 0) obstacle = std::strerror(errno);
      if (process > 0 && channel) channel->keep_own_end();
      member.process = std::max(process, 0);
      if (member.runs()) member.channel = std::move(channel);
    } catch (const UsageError& error) {
      obstacle = error.what();
    }
    if (member.runs()) return std::nullopt;
    slots_.give_back(member.slot);
    return obstacle;
  }

  void take_events() {
    const auto speakers = wait_for_words(members_, signals_.descriptor(), due_.patience());
    if (!speakers) return pass_deadlines();
    for (Member* const speaker : *speakers) take_word(*speaker);
    while (const int signal = signals_.next()) take_signal(signal);
  }

  void take_signal(int signal) {
    if (signal == SIGCHLD) return take_changes();
    due_.spares.reset();
    stop_signal_ = told_to_end_ || signal == SIGHUP ? 0 : signal;
    told_to_end_ = true;
    send(signal);
    for (const Member& member : members_)
      if (member.runs() && member.stopped)
        ::kill(member.process, SIGCONT);  // otherwise it does not see the signal
  }

  /// Ranks that wait are told through their channel.
  void send(int signal) {
    for (const Member& member : members_)
      if (member.runs() && (!member.waits || signal == SIGKILL)) ::kill(member.process, signal);
  }

  void take_changes() {
    int status = 0;
    for (pid_t process; (process = ::waitpid(-1, &status, WNOHANG | WUNTRACED | WCONTINUED)) > 0;) {
      const auto changed = std::find_if(members_.begin(), members_.end(),
                                        [&](const Member& m) { return m.process == process; });
      if (changed == members_.end()) continue;  // possible as process 1 of a container
      changed->stopped = WIFSTOPPED(status);
      if (WIFSTOPPED(status) || WIFCONTINUED(status)) continue;
      changed->process = 0;
      slots_.give_back(changed->slot);
      changed->waits = false;
      note_end(*changed, process, status);
    }
    watch_stopped();
  }

  void note_end(const Member& member, pid_t process, int status) {
    const int code = WIFEXITED(status) ? WEXITSTATUS(status) : kFailed;
    if (code == 0 || ends_) return;
    const std::string end =
        fmt::format("{} (process {}) {}", member.name(), process, end_of_process(status));
    const bool others = count(&Member::runs) > 0;
    if (member.rank < 0 && (told_to_end_ || code == kRefused)) return;  // the ranks report it
    if (member.rank < 0) return tell("{}{}", end, others ? "; the others keep running" : "");
    const bool with_the_others = code == kStopped || code == kDiverged;
    if (status_ == 0 || !with_the_others) status_ = code;
    if (with_the_others && over_ == 0) over_ = code;
    if (with_the_others) return;
    if (belongs_to_stop(status)) return end_stopped(end);
    if (!program_.elastic || told_to_end_ || code == kRefused) {
      failed_ = true;
      tell("{}{}", end, others ? "; ending the other ranks" : "");
      return end_all(end);
    }
    note_loss(end);
    begin_meeting(end);
  }

  void note_loss(const std::string& loss) {
    failed_ = true;
    ++num_lost_;
    tell("{}{}", loss, count(&Member::runs) > 0 ? "; the others keep running" : "");
  }

  /// A rank that the signal killed before it could handle it, or a loss that the remaining ranks
  /// would survive without the signal.
  bool belongs_to_stop(int status) const {
    return program_.elastic && stop_signal_ && WIFSIGNALED(status);
  }

  void end_stopped(const std::string& end) {
    status_ = kStopped;
    tell("{}, after {} to the launcher; the ranks end", end, name_of_stop());
    end_all(reason_of_stop());
  }

  const char* name_of_stop() const { return stop_signal_ == SIGINT ? "SIGINT" : "SIGTERM"; }
  std::string reason_of_stop() const { return fmt::format("{} to the launcher", name_of_stop()); }

  void end_all(const std::string& reason) {
    end_waiting(status_, reason);
    tell_active(reason);
    send(SIGTERM);
  }

  void end_waiting(int status, const std::string& reason) {
    ends_ = true;
    meets_ = false;
    status_ = status;
    reason_ = reason;
    due_.begin_end();
    for (const Member& member : members_)
      if (member.starts()) {
        ::kill(member.process, SIGKILL);
      } else if (member.waits) {
        member.channel->give({{}, status, reason});
        ::kill(member.process, SIGCONT);
      }
  }

  void take_word(Member& member) {
    const auto word = member.channel->receive();
    if (!word) {  // its process is about to end
      member.channel = nullptr;
      member.waits = false;
      return;
    }
    if (word->timeout) {
      timeout_ = *word->timeout;
      folder_ = word->folder;
    }
    if (word->waits) note_waiting(member, *word->waits);
  }

  void note_waiting(Member& member, const WaitingRank& waiting) {
    member.waits = true;
    member.copies = parse_held_copies(waiting.copies);
    fits_ = waiting;
    if (ends_) return member.channel->give({{}, status_, reason_});
    if (member.rank < 0) return;  // a spare is ready
    failed_ = true;
    if (!meets_) kill_stopped();  // the others have waited for them
    begin_meeting(
        fmt::format("rank {} (process {}) has left the round", member.rank, member.process));
    watch_stopped();
  }

  void begin_meeting(const std::string& reason) {
    if (meets_) return;
    meets_ = true;
    due_.begin_meeting(timeout_);
    tell_active(reason);
  }

  void tell_active(const std::string& reason) const {
    for (const Member& member : members_)
      if (member.trains() && member.channel) member.channel->tell_round_is_over(reason);
  }

  void kill_stopped() {
    for (const Member& member : members_)
      if (member.trains() && member.stopped) kill_late(member);
  }

  static void kill_late(const Member& member) {
    tell("{} (process {}) {}; killing it", member.name(), member.process,
         member.stopped    ? "is stopped"
         : member.starts() ? "does not start in time"
                           : "does not leave the round in time");
    ::kill(member.process, SIGKILL);
  }

  void watch_stopped() {
    const bool all = std::all_of(members_.begin(), members_.end(), [](const Member& member) {
      return !member.trains() || member.stopped;
    });
    due_.note_suspended(meets_ && all && count(&Member::is_stopped) > 0);
  }

  void pass_deadlines() {
    if (RankDeadlines::take(due_.suspended))
      for (const Member& member : members_)
        if (member.is_stopped()) kill_late(member);
    if (RankDeadlines::take(due_.ranks)) end_late_ranks();
    if (RankDeadlines::take(due_.spares)) replace_spares();
  }

  void end_late_ranks() {
    for (const Member& member : members_) {
      const bool is_late = member.trains() || (member.starts() && awaits_spare());
      if (meets_ && (is_late || member.is_stopped())) kill_late(member);
      if (!meets_ && member.runs()) ::kill(member.process, SIGKILL);
    }
  }

  void begin_next_round() {
    const int before = static_cast<int>(
        std::count_if(members_.begin(), members_.end(), [](auto& m) { return m.rank >= 0; }));
    const auto left = count(&Member::waits);
    if (over_) return end_waiting(over_, "the run was ending");
    if (stop_signal_) return end_waiting(kStopped, reason_of_stop());
    if (told_to_end_) return end_waiting(kFailed, "the run was ending");
    const int64_t spares = put_spares_in_place(members_, program_.ranks);
    if (spares > 0 && left >= program_.ranks) return begin_round_with_spares(spares);
    if (restarts_ < program_.max_restarts) {
      ++restarts_;
      const auto stay = std::min<int64_t>(left, program_.ranks);
      tell("ranks that stay: {}, ranks restarted: {} (restart {} of {})", stay,
           program_.ranks - stay, restarts_, program_.max_restarts);
      begin_round(program_.ranks);
      return start_spares();
    }
    if (num_lost_ == 0)
      return end_waiting(kFailed, fmt::format("no rank was lost; --max-restarts {} is exhausted",
                                              program_.max_restarts));
    const auto fit = std::find_if(fits_.world_sizes.begin(), fits_.world_sizes.end(),
                                  [&](int64_t ranks) { return ranks <= left; });
    if (fit == fits_.world_sizes.end()) {
      const std::string reason =
          fmt::format("found {} left, allowed by {}: {} ranks", counted(left, "rank"), fits_.limits,
                      fmt::join(fits_.world_sizes.rbegin(), fits_.world_sizes.rend(), ", "));
      tell("{}", reason);
      return end_waiting(kFailed, reason);
    }
    tell("continuing with {} (before: {}, spare: {})", counted(*fit, "rank"), before, left - *fit);
    put_first(members_, static_cast<size_t>(*fit));
    begin_round(static_cast<int>(*fit));
  }

  /// Begins a round with all ranks again.
  void begin_round_with_spares(int64_t taken) {
    tell("ranks that stay: {}, spares that take part: {}", program_.ranks - taken, taken);
    begin_round(program_.ranks);
    if (restarts_ < program_.max_restarts) due_.await_spares();
  }

  void replace_spares() {
    ++restarts_;
    tell("new spares: {} (restart {} of {})",
         static_cast<int64_t>(members_.size()) - count(&Member::runs), restarts_,
         program_.max_restarts);
    start_spares();
  }

  const LaunchedProgram& program_;
  BlockedSignals signals_;
  std::vector<Member> members_;
  SlotPool slots_;
  RankRound round_;
  std::optional<ReservedPort> port_;  ///< of the last round
  int rounds_ = 0, restarts_ = 0;
  int num_lost_ = 0;          ///< in this round
  bool failed_ = false;       ///< a rank of this round has failed
  bool meets_ = false;        ///< remaining ranks wait for the next round
  bool ends_ = false;         ///< the ranks have been told to end
  int over_ = 0;              ///< not 0: a rank ended with it, as all ranks of a run do
  bool told_to_end_ = false;  ///< by a signal to this process
  int stop_signal_ = 0;       ///< SIGTERM or SIGINT, the only signal to this process so far
  int status_ = 0;
  std::string reason_;  ///< why the ranks are to end
  std::string folder_;  ///< of the checkpoints, as a rank reported
  WaitingRank fits_;
  std::optional<std::chrono::milliseconds> timeout_;
  RankDeadlines due_;
};

}  // namespace

int run_rank_processes(const LaunchedProgram& program) { return Ranks(program).run(); }

}  // namespace lockstep
