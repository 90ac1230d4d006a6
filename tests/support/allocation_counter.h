#pragma once

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <new>

/// Counts what `new` allocates. It replaces `operator new`, so only one source file of a program
/// may include it. It does not count tensor memory, which does not come from `new`.
namespace lockstep::testing {

/// A text counts as long if it has this many to this many + 64 characters.
inline constexpr size_t kLongText = 5000;

/// Counts of this thread since it last set them to 0.
struct Allocations {
  int64_t long_texts = 0;  ///< allocations of the size of a long text
};
inline thread_local Allocations allocations;

inline void* allocate_and_count(size_t size) {
  if (size > kLongText && size <= kLongText + 64) ++allocations.long_texts;
  if (void* const memory = std::malloc(size)) return memory;
  throw std::bad_alloc();
}

}  // namespace lockstep::testing

// NOLINTBEGIN(misc-new-delete-overloads, misc-definitions-in-headers)
void* operator new(size_t size) { return lockstep::testing::allocate_and_count(size); }
void* operator new[](size_t size) { return lockstep::testing::allocate_and_count(size); }
void operator delete(void* memory) noexcept { std::free(memory); }
void operator delete[](void* memory) noexcept { std::free(memory); }
void operator delete(void* memory, size_t) noexcept { std::free(memory); }
void operator delete[](void* memory, size_t) noexcept { std::free(memory); }
// NOLINTEND(misc-new-delete-overloads, misc-definitions-in-headers)
