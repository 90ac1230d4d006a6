#include "lockstep/parallel_state/membership.h"

#include <algorithm>
#include <numeric>
#include <random>
#include <thread>

#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include "lockstep/core/check.h"
#include "lockstep/parallel_state/closed_store.h"
#include "lockstep/parallel_state/failure_board.h"
#include "lockstep/parallel_state/gathering.h"
#include "lockstep/parallel_state/network.h"
#include "lockstep/parallel_state/store_client.h"

namespace lockstep {
namespace {

using std::chrono::milliseconds;

constexpr char kAgreed[] = "agreed";
constexpr char kRefused[] = "refused";
constexpr char kGivenBack[] = "given back";
constexpr char kConnecting[] = "connecting";
constexpr char kConfig = 'C', kCommunication = 'X', kMissing = 'M', kUnable = 'U';

/// The time that ranks waiting for a verdict give the rank that is to write it.
constexpr milliseconds kGrace{3000};

std::string claim_key(int64_t rank) { return fmt::format("claim/{}", rank); }

/// Also tells the claims of one process apart, which holds several ranks in tests.
std::string unique_token() {
  std::random_device random;
  return fmt::format("{} {:08x}{:08x}", process_name(), random(), random());
}

std::string process_of(const std::string& token) { return token.substr(0, token.find(' ')); }

std::string encode_fields(const std::vector<AnnouncedField>& fields) {
  std::string text;
  for (const AnnouncedField& field : fields) text += field.name + '\0' + field.value + '\0';
  return text;
}

std::vector<AnnouncedField> decode_fields(const std::string& text) {
  std::vector<AnnouncedField> fields;
  const auto next = [&](size_t& at) {
    const size_t end = std::min(text.find('\0', at), text.size());
    const size_t begin = std::exchange(at, end + 1);
    return text.substr(begin, end - begin);
  };
  for (size_t at = 0; at < text.size();) {
    std::string name = next(at);
    fields.push_back({std::move(name), next(at)});
  }
  return fields;
}

/// " (run id 'today')"; empty if the run has none.
std::string in_words(const std::string& run_id) {
  return run_id.empty() ? "" : fmt::format(" (run id '{}')", run_id);
}

std::string first_difference(const std::vector<AnnouncedField>& first,
                             const std::vector<AnnouncedField>& mine, int64_t rank) {
  const auto text_of = [](const std::vector<AnnouncedField>& fields, const std::string& name) {
    const auto found = std::find_if(fields.begin(), fields.end(),
                                    [&](const AnnouncedField& f) { return f.name == name; });
    return found == fields.end() ? "nothing" : found->value;
  };
  for (const auto* fields : {&first, &mine})
    for (const AnnouncedField& field : *fields) {
      const std::string of_first = text_of(first, field.name), own = text_of(mine, field.name);
      if (of_first != own)
        return fmt::format("{}: rank 0 has {}, rank {} has {}; allowed: the same on all ranks",
                           field.name, of_first, rank, own);
    }
  return fmt::format("the fields that ranks 0 and {} announce are not in the same order", rank);
}

}  // namespace

Membership::Membership(c10::intrusive_ptr<c10d::Store> store, MembershipSpec spec,
                       Clock::time_point deadline)
    : spec_(std::move(spec)),
      whole_(std::move(store)),
      root_(c10::make_intrusive<c10d::PrefixStore>("lockstep/" + spec_.run_id, whole_)),
      deadline_(deadline),
      token_(unique_token()) {
  claim();
}

Membership::~Membership() {
  if (claimed_.empty()) return;
  try {
    // Other stores may be the caller's; their answers here do not depend on the timeout.
    if (dynamic_cast<StoreClient*>(whole_.get())) whole_->setTimeout(kAnswerTime);
    if (!failure_.empty()) post(kUnable, failure_);
    take_process_back(*keys_, spec_.rank);
    root_->compareSet(claim_key(spec_.rank), claimed_,
                      fmt::format("{} {}", generation_, kGivenBack));
    keys_->add("left", 1);
    if (spec_.serves_store) wait_for_check_outs();
    if (spec_.admit && refused_) admit_late_ranks();
  } catch (const std::exception&) {
    // The store is gone with the process that served it.
  }
}

void Membership::claim() {
  std::string seen;
  for (generation_ = 1;; ++generation_) {
    const std::string wanted = fmt::format("{} {}", generation_, token_);
    const std::string now = root_->compareSet(claim_key(spec_.rank), seen, wanted);
    keys_ = c10::make_intrusive<c10d::PrefixStore>(std::to_string(generation_), root_);
    if (now == wanted) {
      claimed_ = wanted;
      break;
    }
    const size_t space = now.find(' ');
    const std::string holder = now.substr(space + 1);
    generation_ = std::stoll(now.substr(0, space));
    if (holder != kGivenBack) refuse_second_claim(generation_, holder);
    seen = now;
  }
  note_process(*keys_, spec_.rank);
  note_here(*keys_, spec_.rank);
  keys_->add("members", 1);
}

void Membership::refuse_second_claim(int64_t generation, const std::string& holder) {
  keys_ = c10::make_intrusive<c10d::PrefixStore>(std::to_string(generation), root_);
  const std::string message = fmt::format(
      "rank {} is claimed twice, by the processes {} and {}{}; allowed: one process per rank, and "
      "a separate run id for each run",
      spec_.rank, process_of(holder), process_of(token_), in_words(spec_.run_id));
  post(kCommunication, message);
  throw CommunicationError(message);
}

void Membership::give_up(const std::string& reason) {
  failure_ = fmt::format("rank {} failed before all ranks had met{}: {}", spec_.rank,
                         in_words(spec_.run_id), reason);
  refused_ = true;
}

void Membership::meet() {
  try {
    compare_fields();
    if (keys_->add("arrived", 1) == spec_.world_size) keys_->compareSet("verdict", "", kAgreed);
    wait_for("verdict");
    obey(keys_->get_to_str("verdict"));
    agreed_ = true;
  } catch (const c10::Error& error) {
    fail<CommunicationError>("{}: rank {} lost the store in which the ranks meet",
                             error.what_without_backtrace(), spec_.rank);
  }
}

void Membership::compare_fields() {
  const std::string mine = encode_fields(spec_.fields);
  if (spec_.rank == 0)
    keys_->compareSet("fields", "", mine);
  else
    wait_for("fields");
  const std::string first = keys_->get_to_str("fields");
  if (first == mine) return;
  if (first != kRefused)
    post(kConfig, first_difference(decode_fields(first), spec_.fields, spec_.rank));
  obey(keys_->get_to_str("verdict"));
}

/// The first rank to time out says for all ranks which ones are missing: with many of them that is
/// a request for each rank. If it has not done so after kGrace, because it died or is slow, one of
/// the others takes over, and so on. The first verdict counts.
void Membership::wait_for(const char* key) {
  RankList gone;
  std::optional<std::string> told;
  const auto look = [&] {
    if (spec_.admit) spec_.admit();
    gone = ended_processes(*keys_, all_ranks());
    told = obstacle();
    return !gone.empty() || told;
  };
  if (wait_for_key(*keys_, key, spec_.world_size, deadline_, look)) return;
  const auto report = [&] { post(kMissing, gone.empty() && told ? *told : missing_ranks(gone)); };
  std::string reporter;
  do {
    reporter = keys_->compareSet("reporter", reporter, token_);
    if (reporter == token_) report();
  } while (!wait_for_key(*keys_, "verdict", spec_.world_size, Clock::now() + kGrace));
  obey(keys_->get_to_str("verdict"));
}

std::optional<std::string> Membership::obstacle() const {
  const auto told = spec_.obstacle ? spec_.obstacle() : std::nullopt;
  if (!told) return std::nullopt;
  return fmt::format("{} before all ranks had met{}", *told, in_words(spec_.run_id));
}

RankList Membership::all_ranks() const {
  RankList ranks(static_cast<size_t>(spec_.world_size));
  std::iota(ranks.begin(), ranks.end(), 0);
  return ranks;
}

std::string Membership::missing_ranks(const RankList& gone) const {
  if (!gone.empty())
    return fmt::format("{} before all ranks had met{}", FailureBoard::Lost{gone, {}}.text(),
                       in_words(spec_.run_id));
  const auto is_told = [&] { return keys_->check({"verdict"}); };
  const AbsentRanks absent = absent_ranks(*keys_, all_ranks(), is_told);
  const double seconds = static_cast<double>(spec_.timeout.count()) / 1e3;
  if (absent.count == 0)
    return fmt::format(
        "all {} ranks have arrived, but not all have met within {:.1f} s: one of them may hang{}",
        spec_.world_size, seconds, in_words(spec_.run_id));
  return fmt::format(
      "{} did not arrive within {:.1f} s: {} of {} ranks have "
      "arrived{}{}",
      absent.text, seconds, spec_.world_size - absent.count, spec_.world_size,
      in_words(spec_.run_id), strangers());
}

/// The refused connections: missing ranks may be among them.
std::string Membership::strangers() const {
  const std::string key = ClosedStore::kRefusedConnections;
  return whole_->check({key}) ? "; " + refused_connections(std::stoll(whole_->get_to_str(key)))
                              : "";
}

/// The first verdict stays. Wakes ranks that wait for rank 0's fields.
std::string Membership::post(char kind, const std::string& message) {
  const std::string verdict = keys_->compareSet("verdict", "", kind + message);
  keys_->compareSet("fields", "", kRefused);
  return verdict;
}

void Membership::obey(const std::string& verdict) {
  if (verdict == kAgreed) return;
  const std::string message = verdict.substr(1);
  incomplete_ = verdict.front() == kMissing;
  refused_ = verdict.front() == kConfig || verdict.front() == kUnable;
  if (verdict.front() == kConfig) throw ConfigError(message);
  throw CommunicationError(message);
}

/// Ranks that are yet to come learn of a refusal too. While a rank is connecting, the whole bound
/// starts again, so that it can read what has failed.
void Membership::wait_for_check_outs() {
  constexpr milliseconds kAfterSuccess{5000}, kAfterFailure{2000}, kAfterRefusal{10000}, kPause{5};
  const auto start = Clock::now();
  auto since = start;
  while (num_absent_members() > 0) {
    const milliseconds bound = !agreed_                 ? kAfterRefusal
                               : posted_failure(*keys_) ? kAfterFailure
                                                        : kAfterSuccess;
    const auto now = Clock::now();
    if (keys_->add(kConnecting, 0) > 0 && now - start <= spec_.timeout) since = now;
    if (now - since > bound) break;
    std::this_thread::sleep_for(kPause);
  }
}

/// Not where a rank was claimed twice or has ended: a late one may be a process of the next round.
void Membership::admit_late_ranks() {
  constexpr milliseconds kPatience{3000}, kPause{20};
  const auto end = std::min(deadline_, Clock::now() + kPatience);
  while (Clock::now() < end && num_to_leave(spec_.world_size) > 0) {
    spec_.admit();
    std::this_thread::sleep_for(kPause);
  }
}

int64_t Membership::num_absent_members() const {
  return num_to_leave(incomplete_ ? keys_->add("members", 0) : spec_.world_size);
}

/// Those of `members` ranks that have not checked out and may still do so.
int64_t Membership::num_to_leave(int64_t members) const {
  const int64_t absent = members - keys_->add("left", 0);
  if (absent == 0) return 0;
  const auto ended = static_cast<int64_t>(ended_processes(*keys_, all_ranks()).size());
  return absent - std::max(ended, number_lost(*keys_));
}

Connecting::Connecting(c10::intrusive_ptr<c10d::Store> store) : store_(std::move(store)) {
  if (store_) store_->add(kConnecting, 1);
}

Connecting::~Connecting() {
  try {
    if (store_) store_->add(kConnecting, -1);
  } catch (const std::exception&) {
    // The store is gone, so nobody waits for this.
  }
}

}  // namespace lockstep
