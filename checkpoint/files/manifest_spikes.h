#pragma once

// Internal.

#include <algorithm>
#include <cmath>

#include "lockstep/checkpoint/manifest.h"

#include "checkpoint/manifest.pb.h"

namespace lockstep {

/// `reader` refuses invalid values: see Reader::check() in manifest.cpp.
template <class Reader>
ManifestSpikes read_spikes(const proto::CheckpointSpikes& from, const Reader& reader) {
  const ManifestSpikes spikes = {{from.loss().begin(), from.loss().end()},
                                 {from.grad_norm().begin(), from.grad_norm().end()},
                                 from.left_out_samples(),
                                 {}};
  reader.check(spikes.losses.size() == spikes.grad_norms.size(),
               "spikes: found {} losses and {} gradient norms, allowed: as many of both",
               spikes.losses.size(), spikes.grad_norms.size());
  for (const auto* const values : {&spikes.losses, &spikes.grad_norms})
    reader.check(std::all_of(values->begin(), values->end(),
                             [](double value) { return std::isfinite(value); }),
                 "spikes: found a number that is not finite, allowed: finite ones");
  reader.check(spikes.left_out_samples >= 0, "spikes: left_out_samples: found {}, allowed: >= 0",
               spikes.left_out_samples);
  return spikes;
}

inline void write_spikes(const ManifestSpikes& spikes, proto::CheckpointManifest& message) {
  if (spikes == ManifestSpikes{}) return;
  proto::CheckpointSpikes& to = *message.mutable_spikes();
  to.mutable_loss()->Assign(spikes.losses.begin(), spikes.losses.end());
  to.mutable_grad_norm()->Assign(spikes.grad_norms.begin(), spikes.grad_norms.end());
  if (spikes.left_out_samples > 0) to.set_left_out_samples(spikes.left_out_samples);
}

}  // namespace lockstep
