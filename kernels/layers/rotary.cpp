#include "lockstep/kernels/rotary.h"

#include <algorithm>
#include <span>

#include <ATen/ATen.h>

#include "lockstep/core/parallel_for.h"
#include "lockstep/kernels/layer_kernels.h"
#include "lockstep/kernels/rotary_loop.h"
#include "lockstep/kernels/rotary_operands.h"

namespace lockstep::kernels {
namespace {

void run(const RotaryTensors& t) {
  if (t.packed.numel() == 0) return;
  const c10::DeviceGuard guard(t.packed.device());
  layer_kernels("rotary", t.packed).rotary(t);
}

/// Does not read from the device.
void check_positions(const at::Tensor& positions, int64_t rows) {
  require<UsageError>(positions.scalar_type() == at::kLong,
                      "rotary: found positions of {}, allowed: Long",
                      at::toString(positions.scalar_type()));
  if (!positions.is_cpu()) return;
  const at::Tensor flat = positions.contiguous();
  for (const int64_t position : std::span(flat.const_data_ptr<int64_t>(), flat.numel()))
    require<UsageError>(position >= 0 && position < rows,
                        "rotary: found position {}, allowed: 0 to {}, those of the table", position,
                        rows - 1);
}

RotaryTable on_device_of(const at::Tensor& heads, const RotaryTable& table) {
  require<UsageError>(table.positions.defined() || heads.size(0) <= table.cos.size(0),
                      "rotary: found a sequence of {}, allowed: {} positions of the table",
                      heads.size(0), table.cos.size(0));
  const auto wide = heads.options().dtype(wide_dtype(heads.scalar_type()));
  const at::Tensor& positions = table.positions;
  require<UsageError>(!positions.defined() || positions.sizes() == heads.sizes().slice(0, 1) ||
                          positions.sizes() == heads.sizes().slice(0, 2),
                      "rotary: found positions {}, allowed: {} or {} x {}",
                      fmt::join(positions.sizes(), " x "), heads.size(0), heads.size(0),
                      heads.size(1));
  if (positions.defined()) check_positions(positions, table.cos.size(0));
  return {table.cos.to(wide).contiguous(), table.sin.to(wide).contiguous(),
          positions.defined() ? positions.to(heads.device()).contiguous() : positions};
}

at::Tensor with_neighbouring_channels(const at::Tensor& heads) {
  return heads.stride(-1) == 1 || heads.size(-1) == 1 ? heads : heads.contiguous();
}

}  // namespace

void rotary_cpu(const RotaryTensors& t) {
  for_storage("rotary", t.packed.scalar_type(), [&](auto element) {
    const auto heads = t.pointers<decltype(element)>();
    const int64_t row = heads.slots() * heads.channels;
    parallel_for(0, t.num_rows(), std::max<int64_t>(1, (1 << 15) / row),
                 [&](int64_t first, int64_t end) { rotary_loop(t.backward, heads, first, end); });
  });
}

AttentionHeads rotate_heads(const at::Tensor& packed, const RotaryTable& table,
                            QueryRange queries) {
  const int64_t sequence = packed.size(0), batch = packed.size(1), groups = packed.size(2);
  const auto made = [&](int64_t heads) {
    return at::empty({sequence, batch, heads, packed.size(4)}, packed.options());
  };
  RotaryTensors t = {.packed = packed.contiguous(),
                     .heads = {made(groups * queries.count), made(groups), made(groups)},
                     .table = on_device_of(packed, table),
                     .queries = queries,
                     .backward = false};
  run(t);
  return t.heads;
}

at::Tensor rotate_heads_backward(const AttentionHeads& grads, const RotaryTable& table,
                                 QueryRange queries, int64_t heads) {
  const at::Tensor& key = grads.key;
  RotaryTensors t = {
      .packed =
          at::empty({key.size(0), key.size(1), key.size(2), heads + 2, key.size(3)}, key.options()),
      .heads = {with_neighbouring_channels(grads.query), with_neighbouring_channels(key),
                with_neighbouring_channels(grads.value)},
      .table = on_device_of(key, table),
      .queries = queries,
      .backward = true};
  run(t);
  return t.packed;
}

}  // namespace lockstep::kernels
