#pragma once

#include <cstdint>
#include <span>
#include <vector>

/// Which data set each sample of a blend comes from, as in Megatron Core's BlendedDataset. Needs no
/// libtorch.
namespace lockstep {

struct BlendedSample {
  int16_t dataset = 0;
  int64_t sample = 0;  ///< of that data set, counted from 0 in order
  bool operator==(const BlendedSample&) const = default;
};

/// `weights` over their sum, with NumPy's rounding, and the results over theirs, because Megatron
/// Core's builder and its BlendedDataset each divide: the last bit decides between data sets that
/// lag equally. UsageError unless there are 1 to 32767 weights, >= 0 with a positive sum.
std::vector<double> normalize_weights(std::span<const double> weights);

/// `size` samples in the proportions of `weights`, which sum to one: each is from the data set that
/// lags the most behind its share; of several, the first. UsageError unless there are 1 to 32767
/// weights.
std::vector<BlendedSample> blend(std::span<const double> weights, int64_t size);

/// The next `size` samples of such a blend, after drawn[i] samples have been drawn from data set i;
/// counts the new ones in `drawn`. UsageError unless there are as many numbers as weights.
std::vector<BlendedSample> continue_blend(std::span<const double> weights, std::span<int64_t> drawn,
                                          int64_t size);

/// Exactly sizes[i] samples of data set i, in these proportions for as long as samples remain.
/// UsageError unless there are 1 to 32767 sizes, >= 0.
std::vector<BlendedSample> blend_all(std::span<const int64_t> sizes);

}  // namespace lockstep
