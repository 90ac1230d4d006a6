// The only source that uses SentencePiece; liblockstep_sentencepiece.so is built from it.

#include <sentencepiece_processor.h>

#include <cstdlib>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "lockstep/datasets/sentencepiece_functions.h"

namespace lockstep {
namespace {

using Processor = sentencepiece::SentencePieceProcessor;

Processor& processor(void* model) { return *static_cast<Processor*>(model); }

void* open(const char* bytes, size_t size) {
  auto model = std::make_unique<Processor>();
  return model->LoadFromSerializedProto({bytes, size}).ok() ? model.release() : nullptr;
}

void close(void* model) { delete &processor(model); }

int64_t vocabulary_size(void* model) { return processor(model).GetPieceSize(); }

int64_t end_of_sentence(void* model) { return processor(model).eos_id(); }

int64_t begin_of_sentence(void* model) { return processor(model).bos_id(); }

bool encode(void* model, const char* text, size_t size, void* sink,
            void (*append)(void*, int64_t)) {
  std::vector<int> ids;
  if (!processor(model).Encode({text, size}, &ids).ok()) return false;
  for (const int id : ids) append(sink, id);
  return true;
}

bool decode(void* model, const int64_t* ids, size_t count, void* sink,
            void (*append)(void*, const char*, size_t)) {
  std::string text;
  if (!processor(model).Decode(std::vector<int>(ids, ids + count), &text).ok()) return false;
  append(sink, text.data(), text.size());
  return true;
}

bool decode_inside(void* model, int64_t id, void* sink,
                   void (*append)(void*, const char*, size_t)) {
  constexpr std::string_view kSpace = "\xE2\x96\x81";
  constexpr size_t kByteNameSize = 6;  // <0x41>
  const Processor& pieces = processor(model);
  const int piece = static_cast<int>(id);
  if (pieces.IsUnknown(piece)) return decode(model, &id, 1, sink, append);
  if (pieces.IsControl(piece)) return true;
  std::string text(pieces.IdToPiece(piece));
  if (pieces.IsByte(piece)) {
    if (text.size() != kByteNameSize) return false;
    const char byte = static_cast<char>(std::strtol(text.c_str() + 3, nullptr, 16));
    append(sink, &byte, 1);
    return true;
  }
  for (size_t at = text.find(kSpace); at != text.npos; at = text.find(kSpace, at + 1))
    text.replace(at, kSpace.size(), " ");
  append(sink, text.data(), text.size());
  return true;
}

constexpr SentencepieceFunctions kFunctions = {
    open,   close,  vocabulary_size, end_of_sentence, begin_of_sentence,
    encode, decode, decode_inside};

}  // namespace
}  // namespace lockstep

extern "C" __attribute__((visibility("default"))) const lockstep::SentencepieceFunctions*
lockstep_sentencepiece_functions() {
  return &lockstep::kFunctions;
}
