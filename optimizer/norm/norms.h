#pragma once

// Internal: the norm of gradients whose pieces are on many ranks.

#include <functional>
#include <vector>

#include <ATen/core/Tensor.h>

#include "lockstep/parallel_state/collectives.h"

namespace lockstep {

/// Flat, contiguous pieces of gradients, real or complex, in classes: those of one class are
/// combined over the same ranks.
using PieceClasses = std::vector<std::vector<at::Tensor>>;

/// Combines what each rank has for each class (0-dim) by `op`, sum or max, into one number.
using CombineClasses = std::function<at::Tensor(const std::vector<at::Tensor>& of_class,
                                                ReduceOp op, const char* label)>;

/// The p-norm, 0-dim fp64 on `device`, accumulated in fp64: p = 2 by the sum of squares, infinity
/// by the largest element, any other p > 0 by powers of elements that are divided by the largest
/// first (one more combination), so that none overflows. For infinity a NaN counts as infinity,
/// because a maximum over ranks may lose it. With other p `combine` must give the same number to
/// all ranks that combine a class.
at::Tensor norm_of_pieces(const PieceClasses& classes, double p, c10::Device device,
                          const CombineClasses& combine);

/// The same for a p of any size, by powers of elements that are divided by the largest first, for
/// finite elements whose squares overflow. Waits for the device; stops at the largest if that is
/// not finite.
at::Tensor scaled_norm_of_pieces(const PieceClasses& classes, double p, c10::Device device,
                                 const CombineClasses& combine);

/// Combines, in place, what the ranks of each class have for that class (0-dim), each class by
/// itself.
using ReduceClasses =
    std::function<void(const std::vector<at::Tensor>& of_class, ReduceOp op, const char* label)>;

/// The same for each class by itself, for a p other than 2 and infinity: ranks that share one class
/// need not share the others.
std::vector<at::Tensor> norms_of_classes(const PieceClasses& classes, double p, c10::Device device,
                                         const ReduceClasses& reduce);

}  // namespace lockstep
