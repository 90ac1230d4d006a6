#include "lockstep/models/key_value_cache.h"

#include <optional>
#include <vector>

#include <ATen/ATen.h>

#include "lockstep/core/check.h"
#include "lockstep/models/input_check.h"

namespace lockstep {
namespace {

/// Which of `all` tokens each of the last `count` may see, repeated for each of `heads`: [heads *
/// count, all]. Unset if they see all of them.
std::optional<at::Tensor> visible_tokens(int64_t heads, int64_t count, int64_t all,
                                         const std::optional<int64_t>& window, c10::Device device) {
  if (count == 1 && (!window || *window >= all)) return {};
  at::Tensor visible =
      at::ones({count, all}, at::TensorOptions(at::kBool).device(device)).tril_(all - count);
  if (window) visible.triu_(all - count - *window + 1);
  return visible.repeat({heads, 1});
}

void check_alike(const at::Tensor& key, const at::Tensor& value) {
  if (key.dim() == 4 && key.sizes() == value.sizes() && key.scalar_type() == value.scalar_type())
    return;
  fail<UsageError>(
      "KeyValueCache: found a key {} and a value {}, allowed: [sequence, batch, groups, channels], "
      "both alike",
      form_of(key), form_of(value));
}

/// `kept`: the keys so far, of any number of tokens.
void check_as_before(const at::Tensor& kept, const at::Tensor& key) {
  require<UsageError>(kept.size(1) == key.size(1),
                      "KeyValueCache: found a batch of {}, allowed: {}, as before", key.size(1),
                      kept.size(1));
  if (kept.sizes().slice(2) == key.sizes().slice(2) && kept.scalar_type() == key.scalar_type())
    return;
  fail<UsageError>("KeyValueCache: found a key {}, allowed: [..., {}, {}] of {}, as before",
                   form_of(key), kept.size(2), kept.size(3), at::toString(kept.scalar_type()));
}

}  // namespace

std::pair<at::Tensor, at::Tensor> KeyValueCache::append(int64_t layer, const at::Tensor& key,
                                                        const at::Tensor& value) {
  check_alike(key, value);
  const int64_t last = length_ + key.size(0);
  require<UsageError>(last <= capacity_, "KeyValueCache: found {} tokens, allowed: {}", last,
                      capacity_);
  Layer& kept = layers_[layer];
  if (!kept.keys.defined()) {
    std::vector<int64_t> sizes = key.sizes().vec();
    sizes.front() = capacity_;
    kept.keys = at::empty(sizes, key.options());
    kept.values = at::empty(sizes, value.options());
  }
  check_as_before(kept.keys, key);
  kept.keys.narrow(0, length_, key.size(0)).copy_(key);
  kept.values.narrow(0, length_, key.size(0)).copy_(value);
  return {kept.keys.narrow(0, 0, last), kept.values.narrow(0, 0, last)};
}

at::Tensor cached_attention(const at::Tensor& query, const at::Tensor& keys,
                            const at::Tensor& values, std::optional<int64_t> window) {
  const int64_t count = query.size(0), batch = query.size(1), channels = query.size(3);
  const int64_t groups = keys.size(2), heads = query.size(2) / groups;
  const at::Tensor rows = query.reshape({count, batch, groups, heads, channels})
                              .permute({1, 2, 3, 0, 4})
                              .reshape({batch, groups, heads * count, channels});
  const at::Tensor mixed = at::scaled_dot_product_attention(
      rows, keys.permute({1, 2, 0, 3}), values.permute({1, 2, 0, 3}),
      visible_tokens(heads, count, keys.size(0), window, query.device()));
  return mixed.view({batch, groups, heads, count, channels})
      .permute({3, 0, 1, 2, 4})
      .reshape({count, batch, -1});
}

}  // namespace lockstep
