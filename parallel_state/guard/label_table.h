#pragma once

// Internal.

#include <algorithm>
#include <memory>
#include <string>
#include <string_view>
#include <unordered_set>
#include <utility>

#include "lockstep/core/text_digest.h"

namespace lockstep {

/// A text that never changes and lives as long as anything refers to it. Never null.
using SharedLabel = std::shared_ptr<const std::string>;

/// One copy of each label, shared by everything that keeps it: the calls of a step have the same
/// labels as those of the previous step. When there are many labels, those that nothing refers to
/// any more are dropped.
class LabelTable {
 public:
  /// The text `prefix` + `label`, which is built only the first time.
  SharedLabel share(std::string_view prefix, std::string_view label) {
    const auto found = labels_.find(Parts{prefix, label});
    if (found != labels_.end()) return *found;
    if (labels_.size() >= most_) forget();
    std::string text;
    text.reserve(prefix.size() + label.size());
    text.append(prefix).append(label);
    return *labels_.insert(std::make_shared<const std::string>(std::move(text))).first;
  }

  size_t size() const { return labels_.size(); }

  /// The number of labels at which those that nothing refers to are dropped.
  static constexpr size_t kMost = 4096;

 private:
  struct Parts {
    std::string_view prefix, label;
  };

  struct Hash {
    using is_transparent = void;
    size_t operator()(const Parts& parts) const {
      return text_digest(parts.label, text_digest(parts.prefix));
    }
    size_t operator()(const SharedLabel& label) const { return text_digest(*label); }
  };

  struct Same {
    using is_transparent = void;
    bool operator()(const SharedLabel& a, const SharedLabel& b) const { return *a == *b; }
    bool operator()(const Parts& parts, const SharedLabel& label) const {
      return label->starts_with(parts.prefix) &&
             std::string_view(*label).substr(parts.prefix.size()) == parts.label;
    }
    bool operator()(const SharedLabel& label, const Parts& parts) const {
      return (*this)(parts, label);
    }
  };

  void forget() {
    std::erase_if(labels_, [](const SharedLabel& label) { return label.use_count() == 1; });
    most_ = std::max(kMost, 2 * labels_.size());
  }

  std::unordered_set<SharedLabel, Hash, Same> labels_;
  size_t most_ = kMost;
};

}  // namespace lockstep
