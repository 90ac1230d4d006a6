#pragma once

#include <cstdint>
#include <span>
#include <vector>

/// Which data set each sample of a blend is from, as Megatron Core's BlendedDataset decides it.
/// Needs no libtorch.
namespace lockstep {

struct BlendedSample {
  int16_t dataset = 0;
  int64_t sample = 0;  ///< of that data set, from 0 on in order
  bool operator==(const BlendedSample&) const = default;
};

/// `weights` over their sum, with NumPy's rounding. UsageError unless there are 1 to 32767 weights,
/// >= 0 with a positive sum.
std::vector<double> normalize_weights(std::span<const double> weights);

/// `size` samples in the proportions of `weights`, which sum to one: each is from the data set that
/// lags most behind its share, of several the first. UsageError unless there are 1 to 32767.
std::vector<BlendedSample> blend(std::span<const double> weights, int64_t size);

/// The next `size` samples of such a blend, of which drawn[i] samples of data set i are there
/// already; counts them in `drawn`. UsageError unless there are as many numbers as weights.
std::vector<BlendedSample> continue_blend(std::span<const double> weights, std::span<int64_t> drawn,
                                          int64_t size);

/// Exactly sizes[i] samples of data set i, in these proportions for as long as there are any.
/// UsageError unless there are 1 to 32767 sizes, >= 0.
std::vector<BlendedSample> blend_all(std::span<const int64_t> sizes);

}  // namespace lockstep
