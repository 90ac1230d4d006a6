#pragma once

// Internal.

#include <algorithm>
#include <cmath>

#include "lockstep/checkpoint/manifest.h"

#include "checkpoint/manifest.pb.h"

namespace lockstep {

// How far the run is. `reader` refuses invalid values: see Reader::check() in manifest.cpp.

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

template <class Reader>
void read_progress(const proto::CheckpointManifest& from, const Reader& reader, Manifest& to) {
  reader.check(from.iteration() >= 0 && from.consumed_samples() >= 0 && from.optimizer_steps() >= 0,
               "iteration, consumed_samples, optimizer_steps: found {}, {}, {}, allowed: >= 0",
               from.iteration(), from.consumed_samples(), from.optimizer_steps());
  reader.check(from.skipped_steps() >= 0 && from.skipped_steps() <= from.iteration(),
               "skipped_steps: found {}, allowed: 0 to the iteration, {}", from.skipped_steps(),
               from.iteration());
  reader.check(from.skipped_samples() >= 0 && from.skipped_samples() <= from.consumed_samples(),
               "skipped_samples: found {}, allowed: 0 to consumed_samples, {}",
               from.skipped_samples(), from.consumed_samples());
  to.iteration = from.iteration();
  to.consumed_samples = from.consumed_samples();
  to.optimizer_steps = from.optimizer_steps();
  to.skipped_steps = from.skipped_steps();
  to.skipped_samples = from.skipped_samples();
  to.spikes = read_spikes(from.spikes(), reader);
}

inline void write_progress(const Manifest& manifest, proto::CheckpointManifest& message) {
  message.set_iteration(manifest.iteration);
  message.set_consumed_samples(manifest.consumed_samples);
  message.set_optimizer_steps(manifest.optimizer_steps);
  if (manifest.skipped_steps > 0) message.set_skipped_steps(manifest.skipped_steps);
  if (manifest.skipped_samples > 0) message.set_skipped_samples(manifest.skipped_samples);
  write_spikes(manifest.spikes, message);
}

}  // namespace lockstep
