#pragma once

// Internal: the interface of liblockstep_sentencepiece.so, in C, because it contains a different
// build of the C++ library.

#include <cstddef>
#include <cstdint>

namespace lockstep {

struct SentencepieceFunctions {
  /// Opens a model from the bytes of its file; nullptr on failure.
  void* (*open)(const char* bytes, size_t size);
  void (*close)(void* model);
  int64_t (*vocabulary_size)(void* model);
  int64_t (*end_of_sentence)(void* model);    ///< -1 if there is none
  int64_t (*begin_of_sentence)(void* model);  ///< -1 if there is none
  /// Passes the ids to `append`. False if the library fails.
  bool (*encode)(void* model, const char* text, size_t size, void* sink,
                 void (*append)(void* sink, int64_t id));
  /// Passes the bytes to `append`. Ids must be inside the vocabulary. False if the library fails.
  bool (*decode)(void* model, const int64_t* ids, size_t count, void* sink,
                 void (*append)(void* sink, const char* bytes, size_t size));
  /// The same for one id inside a text: it keeps its space, and a byte is passed as it is.
  bool (*decode_inside)(void* model, int64_t id, void* sink,
                        void (*append)(void* sink, const char* bytes, size_t size));
};

/// Name and type of the only symbol.
inline constexpr char kSentencepieceSymbol[] = "lockstep_sentencepiece_functions";
using SentencepieceEntry = const SentencepieceFunctions* (*)();

}  // namespace lockstep
