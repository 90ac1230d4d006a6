#include "lockstep/planner/machine.h"

#include <google/protobuf/io/tokenizer.h>
#include <google/protobuf/text_format.h>

#include <algorithm>
#include <cmath>
#include <map>

#include "lockstep/core/check.h"
#include "lockstep/core/input_file.h"
#include "lockstep/planner/ring_bytes.h"

#include "planner/machine.pb.h"

namespace lockstep {
namespace {

namespace pb = google::protobuf;

constexpr int64_t kLongestFile = 1 << 20;

class FirstError : public pb::io::ErrorCollector {
 public:
  void AddError(int line, pb::io::ColumnNumber column, const std::string& message) override {
    if (text_.empty()) text_ = fmt::format("{}:{}: {}", line + 1, column + 1, message);
  }
  const std::string& text() const { return text_; }

 private:
  std::string text_;
};

/// Reads fields and names them in errors.
class Reader {
 public:
  explicit Reader(const std::string& origin) : origin_(origin) {}

  double positive(const std::string& field, bool is_there, double value) const {
    require<ConfigError>(is_there, "{}: {} is missing", origin_, field);
    require<ConfigError>(value > 0 && std::isfinite(value),
                         "{}: {}: found {}, allowed: a number > 0", origin_, field, value);
    return value;
  }
  double share(const std::string& field, bool is_there, double value) const {
    positive(field, is_there, value);
    require<ConfigError>(value <= 1, "{}: {}: found {}, allowed: up to 1", origin_, field, value);
    return value;
  }

  Machine::Link link(const std::string& field, const proto::MachineLink& link) const {
    const double rate = positive(field + ".gb_per_s", link.has_gb_per_s(), link.gb_per_s()) *
                        share(field + ".efficiency", link.has_efficiency(), link.efficiency());
    return {.bytes_per_s = 1e9 * rate,
            .latency_s =
                1e-6 * positive(field + ".latency_us", link.has_latency_us(), link.latency_us())};
  }

  std::vector<Machine::Efficiency> efficiencies(
      const std::string& field, const pb::RepeatedPtrField<proto::MachineEfficiency>& list,
      double unit) const {
    std::vector<Machine::Efficiency> all;
    for (const proto::MachineEfficiency& one : list)
      all.push_back({unit * one.from(), share(field + ".share", one.has_share(), one.share())});
    std::sort(all.begin(), all.end(), [](const auto& a, const auto& b) { return a.from > b.from; });
    require<ConfigError>(!all.empty() && all.back().from == 0,
                         "{}: {}: allowed: one or more, of which one is from 0", origin_, field);
    return all;
  }

 private:
  std::string origin_;
};

double share_of(const std::vector<Machine::Efficiency>& shares, double work) {
  const auto found =
      std::find_if(shares.begin(), shares.end(), [&](const auto& one) { return work >= one.from; });
  return found == shares.end() ? 1 : found->share;
}

}  // namespace

double Machine::seconds(const ProgramKernel& kernel) const {
  const auto bytes = static_cast<double>(kernel.bytes);
  double time = bytes / (memory_bytes_per_s * share_of(memory, bytes));
  if (kernel.flops > 0) {
    const bool wide = kernel.dtype == "Float" || kernel.dtype == "Double";
    time += kernel.flops /
            ((wide ? wide_flops_per_s : half_flops_per_s) * share_of(matrix, kernel.flops));
  }
  return time;
}

double Machine::seconds(const ProgramCall& call, const RankList& ranks, int64_t position) const {
  const auto bytes = static_cast<double>(
      ring_bytes(call.operation.kind, call.bytes, static_cast<int64_t>(ranks.size())));
  std::map<int64_t, int64_t> on_host;
  const auto host_of = [&](int64_t place) {
    return ranks[static_cast<size_t>(place)] / ranks_per_host;
  };
  const bool to_one =
      call.is_message() || call.operation.kind == CollectiveOperation::Kind::exchange;
  if (to_one) {
    on_host[host_of(position)] = 1;
    on_host[host_of(call.operation.position)] = 1;
  } else {
    for (const int64_t rank : ranks) ++on_host[rank / ranks_per_host];
  }
  if (on_host.size() == 1) return inside_host.latency_s + bytes / inside_host.bytes_per_s;
  int64_t fewest = ranks_per_host;
  for (const auto& [host, count] : on_host) fewest = std::min(fewest, count);
  const double rate = std::min(static_cast<double>(fewest) * between_hosts.bytes_per_s,
                               std::max(inside_host.bytes_per_s, between_hosts.bytes_per_s));
  return between_hosts.latency_s + bytes / rate;
}

Machine parse_machine(const std::string& text, const std::string& origin) {
  proto::Machine message;
  FirstError errors;
  pb::TextFormat::Parser parser;
  parser.RecordErrorsTo(&errors);
  if (!parser.ParseFromString(text, &message))
    fail<ConfigError>("{}:{}", origin, errors.text().empty() ? " no machine" : errors.text());
  const Reader reader(origin);
  require<ConfigError>(message.ranks_per_host() >= 1, "{}: ranks_per_host: found {}, allowed: >= 1",
                       origin, message.ranks_per_host());
  Machine machine;
  machine.name = message.name();
  machine.ranks_per_host = message.ranks_per_host();
  machine.half_flops_per_s =
      1e12 * reader.positive("half_tflops", message.has_half_tflops(), message.half_tflops());
  machine.wide_flops_per_s =
      1e12 * reader.positive("wide_tflops", message.has_wide_tflops(), message.wide_tflops());
  machine.memory_bytes_per_s =
      1e9 *
      reader.positive("memory_gb_per_s", message.has_memory_gb_per_s(), message.memory_gb_per_s());
  machine.matrix = reader.efficiencies("matrix_efficiency", message.matrix_efficiency(), 1e9);
  machine.memory = reader.efficiencies("memory_efficiency", message.memory_efficiency(), 1e6);
  machine.inside_host = reader.link("inside_host", message.inside_host());
  machine.between_hosts = reader.link("between_hosts", message.between_hosts());
  return machine;
}

Machine load_machine(const std::string& path) {
  return parse_machine(read_file(path, kLongestFile, /*follow_links=*/true), path);
}

}  // namespace lockstep
