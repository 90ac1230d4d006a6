#pragma once

// Internal: what liblockstep_sentencepiece.so offers, in C's terms, since it has a C++ library of
// another make within.

#include <cstddef>
#include <cstdint>

namespace lockstep {

struct SentencepieceFunctions {
  /// A model out of the bytes of its file, or nullptr.
  void* (*open)(const char* bytes, size_t size);
  void (*close)(void* model);
  int64_t (*vocabulary_size)(void* model);
  int64_t (*end_of_sentence)(void* model);  ///< -1 if there is none
  /// Gives `append` the ids. False if the library fails.
  bool (*encode)(void* model, const char* text, size_t size, void* sink,
                 void (*append)(void* sink, int64_t id));
  /// Gives `append` the bytes. Ids are inside the vocabulary. False if the library fails.
  bool (*decode)(void* model, const int64_t* ids, size_t count, void* sink,
                 void (*append)(void* sink, const char* bytes, size_t size));
};

/// Name and type of the one symbol.
inline constexpr char kSentencepieceSymbol[] = "lockstep_sentencepiece_functions";
using SentencepieceEntry = const SentencepieceFunctions* (*)();

}  // namespace lockstep
