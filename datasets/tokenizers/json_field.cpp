#include "lockstep/datasets/json_field.h"

#include <algorithm>
#include <limits>

namespace lockstep {
namespace {

constexpr size_t kLongestQuote = 60;
const JsonField::Json kNull;

std::string quoted(const JsonField::Json& json) {
  std::string text = json.dump(-1, ' ', false, JsonField::Json::error_handler_t::replace);
  if (text.size() <= kLongestQuote) return text;
  size_t end = kLongestQuote;
  while (static_cast<unsigned char>(text[end]) >> 6 == 2) --end;
  return text.substr(0, end) + "...";
}

}  // namespace

std::string problem_of(const nlohmann::json::exception& error) {
  const std::string_view text = error.what();
  constexpr std::string_view kNameEnds = "] ";
  const size_t end = text.starts_with("[json.exception") ? text.find(kNameEnds) : text.npos;
  return std::string(end == text.npos ? text : text.substr(end + kNameEnds.size()));
}

bool is_int64(const nlohmann::json& json) {
  return json.is_number_integer() &&
         (!json.is_number_unsigned() ||
          json.get<uint64_t>() <= uint64_t{std::numeric_limits<int64_t>::max()});
}

bool is_int64_array(const nlohmann::json& json) {
  return json.is_array() && std::all_of(json.begin(), json.end(), is_int64);
}

JsonField::JsonField(const Json& json, const std::string& path)
    : json_(&json), place_("'" + path + "':") {}

void JsonField::refuse(std::string_view allowed) const {
  fail<FileError>("{}: found {}, allowed: {}",
                  place_.ends_with(':') ? place_.substr(0, place_.size() - 1) : place_,
                  quoted(*json_), allowed);
}

JsonField JsonField::operator[](std::string_view name) const {
  const auto found = object().find(std::string(name));
  const std::string place = fmt::format("{}{}{}", place_, place_.ends_with(':') ? " " : ".", name);
  return {found == object().end() ? &kNull : &found->second, place};
}

size_t JsonField::size() const {
  if (!json_->is_array()) refuse("an array");
  return json_->size();
}

JsonField JsonField::at(size_t index) const {
  return {&json_->at(index), fmt::format("{}[{}]", place_, index)};
}

std::string JsonField::text() const {
  if (!json_->is_string()) refuse("a string");
  return json_->get<std::string>();
}

std::string JsonField::text_or(const std::string& otherwise) const {
  return is_null() ? otherwise : text();
}

bool JsonField::flag() const {
  if (!json_->is_boolean()) refuse("true or false");
  return json_->get<bool>();
}

bool JsonField::flag_or(bool otherwise) const { return is_null() ? otherwise : flag(); }

uint32_t JsonField::number(uint32_t most) const {
  if (!json_->is_number_unsigned() || json_->get<uint64_t>() > most)
    refuse(fmt::format("0 to {}", most));
  return json_->get<uint32_t>();
}

const JsonField::Json::object_t& JsonField::object() const {
  if (!json_->is_object()) refuse("an object");
  return json_->get_ref<const Json::object_t&>();
}

void JsonField::expect_null_or(const Json& otherwise) const {
  if (!is_null() && *json_ != otherwise) refuse("null or " + otherwise.dump());
}

}  // namespace lockstep
