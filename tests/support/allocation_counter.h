#pragma once

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <new>

/// Counts what `new` allocates. It replaces `operator new`, so only one source of a program may
/// include it. Memory of tensors does not come from there.
namespace lockstep::testing {

/// A text of so many characters, or of up to 64 more, is a long one.
inline constexpr size_t kLongText = 5000;

/// Of this thread, since it set them to 0.
struct Allocations {
  int64_t long_texts = 0;  ///< what copies of long texts take
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
