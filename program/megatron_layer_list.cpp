#include <charconv>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "lockstep/core/check.h"
#include "lockstep/program/megatron_rules.h"

namespace lockstep {
namespace {

constexpr size_t kMostLayers = 100000;
constexpr int kDeepest = 100;  // parentheses inside each other

/// sum: product ('+' product)*; product: list ('*' number)*; list: '[' numbers ']' | '(' sum ')'
class LayerList {
 public:
  explicit LayerList(const std::string& text) : text_(text) {
    for (const char c : text)
      if (c != ' ') rest_ += c;
    left_ = rest_;
  }

  std::vector<int64_t> whole() {
    std::vector<int64_t> layers = sum();
    if (!left_.empty()) refuse();
    return layers;
  }

 private:
  std::vector<int64_t> sum() {
    std::vector<int64_t> layers = product();
    while (take('+')) {
      const std::vector<int64_t> more = product();
      layers.insert(layers.end(), more.begin(), more.end());
    }
    return layers;
  }

  std::vector<int64_t> product() {
    std::vector<int64_t> layers = list();
    while (take('*')) {
      const std::vector<int64_t> once = layers;
      const int64_t times = number();
      if (times > static_cast<int64_t>(kMostLayers)) refuse();
      layers.clear();
      for (int64_t i = 0; i < times; ++i) {
        layers.insert(layers.end(), once.begin(), once.end());
        if (layers.size() > kMostLayers) refuse();
      }
    }
    return layers;
  }

  std::vector<int64_t> list() {
    std::vector<int64_t> layers;
    if (take('(')) {
      if (++depth_ > kDeepest) refuse();
      layers = sum();
      if (!take(')')) refuse();
      --depth_;
      return layers;
    }
    if (!take('[')) refuse();
    if (take(']')) return layers;
    do {
      layers.push_back(number());
    } while (take(','));
    if (!take(']')) refuse();
    return layers;
  }

  int64_t number() {
    int64_t value = 0;
    const auto [after, error] = std::from_chars(left_.data(), left_.data() + left_.size(), value);
    if (error != std::errc() || value < 0) refuse();
    left_.remove_prefix(static_cast<size_t>(after - left_.data()));
    return value;
  }

  bool take(char c) {
    if (!left_.starts_with(c)) return false;
    left_.remove_prefix(1);
    return true;
  }

  [[noreturn]] void refuse() const {
    fail<ConfigError>(
        "--moe-layer-freq: found '{}', allowed: a number, or a list as in "
        "([0]*1+[1]*26)",
        text_);
  }

  std::string text_, rest_;
  std::string_view left_;
  int depth_ = 0;
};

}  // namespace

std::vector<int64_t> evaluate_layer_list(const std::string& expression) {
  return LayerList(expression).whole();
}

}  // namespace lockstep
