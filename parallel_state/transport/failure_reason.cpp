#include "lockstep/parallel_state/failure_reason.h"

#include <algorithm>

#include <c10/util/Exception.h>

#include "lockstep/parallel_state/peer_error.h"

namespace lockstep {
namespace {

/// Gloo's messages begin with "[/path/gloo/transport/tcp/pair.cc:534] ".
std::string without_place(std::string text) {
  const size_t begin = text.find("[/"), end = text.find("] ", begin);
  const bool place = begin != std::string::npos && end != std::string::npos &&
                     text.substr(begin, end - begin).find("/gloo/") != std::string::npos;
  return place ? text.erase(begin, end + 2 - begin) : text;
}

}  // namespace

std::string reason_of(const std::exception& error) {
  const auto* c10_error = dynamic_cast<const c10::Error*>(&error);
  std::string text = c10_error ? c10_error->what_without_backtrace() : error.what();
  std::replace(text.begin(), text.end(), '\n', ' ');
  return without_place(std::move(text));
}

std::string reason_of(const std::exception& error, const RankList& ranks) {
  const auto* const peer = dynamic_cast<const PeerError*>(&error);
  return peer ? peer->text(ranks.at(static_cast<size_t>(peer->peer()))) : reason_of(error);
}

}  // namespace lockstep
