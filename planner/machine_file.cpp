#include <google/protobuf/io/tokenizer.h>
#include <google/protobuf/text_format.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <set>
#include <string_view>

#include "lockstep/core/check.h"
#include "lockstep/core/input_file.h"
#include "lockstep/planner/machine.h"

#include "planner/machine.pb.h"

namespace lockstep {
namespace {

namespace pb = google::protobuf;

constexpr int64_t kLongestFile = 1 << 20;
// Beyond them sums and ratios of times may be neither.
constexpr double kLeast = 1e-100, kMost = 1e100;
constexpr std::array<std::string_view, 14> kDtypes = {
    "BFloat16", "Bool",          "Byte",        "Char", "ComplexDouble", "ComplexFloat", "Double",
    "Float",    "Float8_e4m3fn", "Float8_e5m2", "Half", "Int",           "Long",         "Short"};
constexpr std::array<std::string_view, 7> kCollectives = {
    "all_reduce", "reduce_scatter", "all_gather", "all_to_all", "broadcast", "send", "exchange"};

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
    require<ConfigError>(value >= kLeast, "{}: {}: found {}, allowed: {} or more", origin_, field,
                         value, kLeast);
    return not_too_large(field, value);
  }
  double not_negative(const std::string& field, double value) const {
    require<ConfigError>(value >= 0 && std::isfinite(value),
                         "{}: {}: found {}, allowed: a number >= 0", origin_, field, value);
    return not_too_large(field, value);
  }
  double at_most_one(const std::string& field, double value) const {
    require<ConfigError>(value <= 1, "{}: {}: found {}, allowed: up to 1", origin_, field, value);
    return value;
  }
  double share(const std::string& field, bool is_there, double value) const {
    return at_most_one(field, positive(field, is_there, value));
  }

  std::vector<Machine::Efficiency> efficiencies(
      const std::string& field, const pb::RepeatedPtrField<proto::MachineEfficiency>& list,
      double unit) const {
    std::vector<Machine::Efficiency> all;
    for (const proto::MachineEfficiency& one : list)
      all.push_back({unit * not_negative(field + ".from", one.from()),
                     share(field + ".share", one.has_share(), one.share())});
    std::sort(all.begin(), all.end(), [](const auto& a, const auto& b) { return a.from > b.from; });
    require<ConfigError>(!all.empty(), "{}: {} is missing", origin_, field);
    require<ConfigError>(all.back().from == 0,
                         "{}: {}: found {} as the least `from`, allowed: one that is 0", origin_,
                         field, all.back().from / unit);
    const auto same = std::adjacent_find(
        all.begin(), all.end(), [](const auto& a, const auto& b) { return a.from == b.from; });
    require<ConfigError>(same == all.end(), "{}: {}.from: found {} twice, allowed: once", origin_,
                         field, same == all.end() ? 0 : same->from / unit);
    return all;
  }

  std::vector<Machine::Point> points(const std::string& field,
                                     const pb::RepeatedPtrField<proto::MachinePoint>& list) const {
    std::vector<Machine::Point> all;
    for (const proto::MachinePoint& point : list) {
      const double work = positive(field + ".work", point.has_work(), point.work());
      require<ConfigError>(all.empty() || work > all.back().work,
                           "{}: {}.work: found {} after {}, allowed: growing numbers", origin_,
                           field, work, all.empty() ? 0 : all.back().work);
      all.push_back({work, 1e-6 * positive(field + ".us", point.has_us(), point.us())});
    }
    require<ConfigError>(!all.empty(), "{}: {} is missing", origin_, field);
    return all;
  }

  std::vector<Machine::Times> operators(
      const pb::RepeatedPtrField<proto::MachineOperator>& list) const {
    std::vector<Machine::Times> all;
    std::set<std::pair<std::string, std::string>> known;
    for (const proto::MachineOperator& one : list) {
      require<ConfigError>(!one.name().empty(), "{}: operator.name is missing", origin_);
      require<ConfigError>(one.dtype().empty() || std::find(kDtypes.begin(), kDtypes.end(),
                                                            one.dtype()) != kDtypes.end(),
                           "{}: operator \"{}\": dtype: found \"{}\", allowed: {}", origin_,
                           one.name(), one.dtype(), fmt::join(kDtypes, ", "));
      require<ConfigError>(known.insert({one.name(), one.dtype()}).second,
                           "{}: operator \"{}\" of dtype \"{}\": found twice, allowed: once",
                           origin_, one.name(), one.dtype());
      all.push_back({one.name(), one.dtype(),
                     points(fmt::format("operator \"{}\": point", one.name()), one.point())});
    }
    return all;
  }

  std::vector<Machine::Times> collectives(
      const std::string& field, const pb::RepeatedPtrField<proto::MachineCollective>& list) const {
    std::vector<Machine::Times> all;
    std::set<std::string> known;
    for (const proto::MachineCollective& one : list) {
      require<ConfigError>(
          std::find(kCollectives.begin(), kCollectives.end(), one.name()) != kCollectives.end(),
          "{}: {}.name: found \"{}\", allowed: {}", origin_, field, one.name(),
          fmt::join(kCollectives, ", "));
      require<ConfigError>(known.insert(one.name()).second,
                           "{}: {} \"{}\": found twice, allowed: once", origin_, field, one.name());
      all.push_back({one.name(), "",
                     points(fmt::format("{} \"{}\": point", field, one.name()), one.point())});
    }
    return all;
  }

  Machine::Link link(const std::string& field, const proto::MachineLink& link) const {
    const double rate = positive(field + ".gb_per_s", link.has_gb_per_s(), link.gb_per_s()) *
                        share(field + ".efficiency", link.has_efficiency(), link.efficiency());
    const double latency =
        positive(field + ".latency_us", link.has_latency_us(), link.latency_us());
    const std::string occupancy = field + ".occupancy";
    return {.bytes_per_s = 1e9 * rate,
            .latency_s = 1e-6 * latency,
            .occupancy = at_most_one(occupancy, not_negative(occupancy, link.occupancy())),
            .collectives = collectives(field + ".collective", link.collective())};
  }

 private:
  double not_too_large(const std::string& field, double value) const {
    require<ConfigError>(value <= kMost, "{}: {}: found {}, allowed: up to {}", origin_, field,
                         value, kMost);
    return value;
  }

  std::string origin_;
};

template <class Points>
void write_points(const std::vector<Machine::Point>& points, Points& to) {
  for (const Machine::Point& point : points) {
    proto::MachinePoint* const one = to.add_point();
    one->set_work(point.work);
    one->set_us(1e6 * point.seconds);
  }
}

void write_link(const Machine::Link& link, proto::MachineLink& to) {
  to.set_gb_per_s(link.bytes_per_s / 1e9);
  to.set_efficiency(1);
  to.set_latency_us(1e6 * link.latency_s);
  to.set_occupancy(link.occupancy);
  for (const Machine::Times& times : link.collectives) {
    proto::MachineCollective* const one = to.add_collective();
    one->set_name(times.name);
    write_points(times.points, *one);
  }
}

template <class Add>
void write_efficiencies(const std::vector<Machine::Efficiency>& list, double unit, Add&& add) {
  for (const Machine::Efficiency& efficiency : list) {
    proto::MachineEfficiency* const one = add();
    one->set_from(efficiency.from / unit);
    one->set_share(efficiency.share);
  }
}

}  // namespace

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
  if (message.has_fp8_tflops())
    machine.fp8_flops_per_s = 1e12 * reader.positive("fp8_tflops", true, message.fp8_tflops());
  machine.memory_bytes_per_s =
      1e9 *
      reader.positive("memory_gb_per_s", message.has_memory_gb_per_s(), message.memory_gb_per_s());
  machine.matrix = reader.efficiencies("matrix_efficiency", message.matrix_efficiency(), 1e9);
  if (message.fp8_matrix_efficiency_size() > 0)
    machine.fp8_matrix =
        reader.efficiencies("fp8_matrix_efficiency", message.fp8_matrix_efficiency(), 1e9);
  machine.memory = reader.efficiencies("memory_efficiency", message.memory_efficiency(), 1e6);
  machine.inside_host = reader.link("inside_host", message.inside_host());
  if (message.has_between_hosts())
    machine.between_hosts = reader.link("between_hosts", message.between_hosts());
  machine.launch_s = 1e-6 * reader.not_negative("launch_us", message.launch_us());
  machine.synchronous = message.synchronous();
  if (message.has_cores()) {
    require<ConfigError>(machine.ranks_per_host > 1,
                         "{}: cores: found {}, allowed: unset, because ranks_per_host is 1", origin,
                         message.cores());
    require<ConfigError>(
        message.cores() >= 1 && message.cores() < machine.ranks_per_host && machine.synchronous,
        "{}: cores: found {}, allowed: 1 to {}, fewer than ranks_per_host, with synchronous: true",
        origin, message.cores(), machine.ranks_per_host - 1);
    machine.cores = message.cores();
  }
  if (message.has_attention_efficiency())
    machine.attention = reader.share("attention_efficiency", true, message.attention_efficiency());
  machine.operators = reader.operators(message.operator_());
  return machine;
}

Machine load_machine(const std::string& path) {
  return parse_machine(read_file(path, kLongestFile, /*follow_links=*/true), path);
}

std::string machine_text(const Machine& machine) {
  proto::Machine message;
  message.set_name(machine.name);
  message.set_ranks_per_host(machine.ranks_per_host);
  message.set_half_tflops(machine.half_flops_per_s / 1e12);
  message.set_wide_tflops(machine.wide_flops_per_s / 1e12);
  if (machine.fp8_flops_per_s > 0) message.set_fp8_tflops(machine.fp8_flops_per_s / 1e12);
  message.set_memory_gb_per_s(machine.memory_bytes_per_s / 1e9);
  write_efficiencies(machine.matrix, 1e9, [&] { return message.add_matrix_efficiency(); });
  write_efficiencies(machine.fp8_matrix, 1e9, [&] { return message.add_fp8_matrix_efficiency(); });
  write_efficiencies(machine.memory, 1e6, [&] { return message.add_memory_efficiency(); });
  if (machine.attention > 0) message.set_attention_efficiency(machine.attention);
  write_link(machine.inside_host, *message.mutable_inside_host());
  if (machine.between_hosts.bytes_per_s > 0)
    write_link(machine.between_hosts, *message.mutable_between_hosts());
  message.set_launch_us(1e6 * machine.launch_s);
  message.set_synchronous(machine.synchronous);
  if (machine.cores > 0) message.set_cores(machine.cores);
  for (const Machine::Times& times : machine.operators) {
    proto::MachineOperator* const one = message.add_operator_();
    one->set_name(times.name);
    if (!times.dtype.empty()) one->set_dtype(times.dtype);
    write_points(times.points, *one);
  }
  std::string text;
  pb::TextFormat::PrintToString(message, &text);
  return text;
}

}  // namespace lockstep
