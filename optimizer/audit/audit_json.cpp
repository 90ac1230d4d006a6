#include <algorithm>
#include <nlohmann/json.hpp>
#include <set>

#include "lockstep/core/check.h"
#include "lockstep/optimizer/audit_report.h"

namespace lockstep {
namespace {

using Json = nlohmann::ordered_json;

constexpr size_t kMostShown = 40;

Json json_of(const AuditedParameter& param) {
  Json terms = Json::array();
  for (const AuditTerms& of : param.terms)
    terms.push_back(
        {{"numerator", of.numerator}, {"denominator", of.denominator}, {"ranks", of.ranks}});
  return {{"name", param.name},
          {"chunk", param.chunk},
          {"shape", param.shape},
          {"description", param.description},
          {"reduction", param.reduction},
          {"first", param.first},
          {"last", param.last},
          {"terms", std::move(terms)},
          {"token_ranks", param.token_ranks},
          {"counted", param.counted},
          {"update", param.update},
          {"tie", param.tie},
          {"copies", param.copies},
          {"replicas", param.replicas},
          {"effect", param.effect},
          {"problem", param.problem}};
}

Json json_of(const AuditedRank& rank) {
  Json params = Json::array();
  for (const AuditedParameter& param : rank.parameters) params.push_back(json_of(param));
  return {{"rank", rank.rank},
          {"norm_elements", rank.norm_elements},
          {"zero_elements", rank.zero_elements},
          {"parameters", std::move(params)}};
}

/// The fields of one object, which know their place in the document.
class Fields {
 public:
  Fields(const Json& json, std::string source, std::string path)
      : json_(json), source_(std::move(source)), path_(std::move(path)) {
    if (!json_.is_object()) refuse(path_.empty() ? "document" : path_, json_, "an object");
  }

  void read(const char* name, std::string& value) const {
    const Json& field = at(name);
    if (!field.is_string()) refuse(place(name), field, "a string");
    value = field.get<std::string>();
  }
  void read(const char* name, bool& value) const {
    const Json& field = at(name);
    if (!field.is_boolean()) refuse(place(name), field, "true, false");
    value = field.get<bool>();
  }
  void read(const char* name, int64_t& value, int64_t least = 0) const {
    value = integer(place(name), at(name), least);
  }
  void read(const char* name, std::vector<int64_t>& values) const {
    const Json& field = list(name);
    for (size_t i = 0; i < field.size(); ++i)
      values.push_back(integer(fmt::format("{}[{}]", place(name), i), field[i], 0));
  }
  /// The fields of each object in a list.
  std::vector<Fields> objects(const char* name) const {
    std::vector<Fields> all;
    const Json& field = list(name);
    for (size_t i = 0; i < field.size(); ++i)
      all.emplace_back(field[i], source_, fmt::format("{}[{}]", place(name), i));
    return all;
  }

  std::string place(const char* name) const {
    return path_.empty() ? name : fmt::format("{}.{}", path_, name);
  }
  [[noreturn]] void refuse(const std::string& place, const Json& found,
                           const std::string& allowed) const {
    std::string text = found.dump();
    if (text.size() > kMostShown) text = text.substr(0, kMostShown) + "...";
    fail<FileError>("{}: {}: found {}, allowed: {}", source_, place, text, allowed);
  }

 private:
  const Json& at(const char* name) const {
    const auto found = json_.find(name);
    require<FileError>(found != json_.end(), "{}: {}: missing", source_, place(name));
    return *found;
  }
  const Json& list(const char* name) const {
    const Json& field = at(name);
    if (!field.is_array()) refuse(place(name), field, "a list");
    return field;
  }
  int64_t integer(const std::string& place, const Json& field, int64_t least) const {
    const bool is_huge = field.is_number_unsigned() && field.get<uint64_t>() > INT64_MAX;
    if (!field.is_number_integer() || is_huge || field.get<int64_t>() < least)
      refuse(place, field, fmt::format("an integer, >= {}", least));
    return field.get<int64_t>();
  }

  const Json& json_;
  std::string source_, path_;
};

AuditedParameter param_of(const Fields& fields) {
  AuditedParameter param;
  fields.read("name", param.name);
  fields.read("chunk", param.chunk);
  fields.read("shape", param.shape);
  fields.read("description", param.description);
  fields.read("reduction", param.reduction);
  fields.read("first", param.first);
  fields.read("last", param.last, param.first);
  for (const Fields& of : fields.objects("terms")) {
    AuditTerms& terms = param.terms.emplace_back();
    of.read("numerator", terms.numerator, INT64_MIN);
    of.read("denominator", terms.denominator, 1);
    of.read("ranks", terms.ranks);
  }
  fields.read("token_ranks", param.token_ranks);
  fields.read("counted", param.counted);
  fields.read("update", param.update);
  fields.read("tie", param.tie);
  fields.read("copies", param.copies, 1);
  fields.read("replicas", param.replicas, 1);
  fields.read("effect", param.effect);
  fields.read("problem", param.problem);
  return param;
}

AuditedRank rank_of(const Fields& fields) {
  AuditedRank rank;
  fields.read("rank", rank.rank);
  fields.read("norm_elements", rank.norm_elements);
  fields.read("zero_elements", rank.zero_elements);
  for (const Fields& param : fields.objects("parameters"))
    rank.parameters.push_back(param_of(param));
  return rank;
}

Json parsed(const std::string& json, const std::string& source) {
  try {
    return Json::parse(json);
  } catch (const Json::exception& error) {
    fail<FileError>("{}: {}", source, error.what());
  }
}

}  // namespace

std::string to_json(const AuditReport& report) {
  Json ranks = Json::array();
  for (const AuditedRank& rank : report.ranks) ranks.push_back(json_of(rank));
  const Json json = {{"world_size", report.world_size},
                     {"layout", report.layout},
                     {"scaling", report.scaling},
                     {"ranks", std::move(ranks)}};
  return json.dump() + "\n";
}

std::string to_json(const AuditedRank& rank) { return json_of(rank).dump(); }

AuditReport parse_audit_report(const std::string& json, const std::string& source) {
  const std::string told = source + ": no audit";
  const Json document = parsed(json, told);
  const Fields fields(document, told, "");
  AuditReport report;
  fields.read("world_size", report.world_size, 1);
  fields.read("layout", report.layout);
  fields.read("scaling", report.scaling);
  std::set<int64_t> ranks;
  for (const Fields& of_rank : fields.objects("ranks")) {
    const AuditedRank& rank = report.ranks.emplace_back(rank_of(of_rank));
    require<FileError>(rank.rank < report.world_size, "{}: {}: found {}, allowed: 0 to {}", told,
                       of_rank.place("rank"), rank.rank, report.world_size - 1);
    require<FileError>(ranks.insert(rank.rank).second, "{}: {}: found {} twice, allowed: once",
                       told, of_rank.place("rank"), rank.rank);
  }
  return report;
}

AuditedRank parse_audited_rank(const std::string& json, const std::string& source) {
  const std::string told = source + ": no audit of a rank";
  const Json document = parsed(json, told);
  return rank_of(Fields(document, told, ""));
}

}  // namespace lockstep
