#include "lockstep/datasets/conversation_set.h"

#include <algorithm>

#include "lockstep/core/check.h"
#include "lockstep/datasets/conversation.h"
#include "lockstep/datasets/conversation_encoder.h"
#include "lockstep/datasets/document_reader.h"

namespace lockstep {
namespace {

bool is_blank(std::string_view line) {
  return line.find_first_not_of(" \t\r") == std::string_view::npos;
}

}  // namespace

/// Adds the conversations of files to a set.
class ConversationSet::Reader {
 public:
  Reader(ConversationSet& set, ConversationEncoder& encoder, const Limits& limits)
      : set_(set), encoder_(encoder), limits_(limits) {}

  void read(const std::string& path, const std::string& field) {
    DocumentReader reader(path);
    std::string line;
    const auto place = [&](int64_t number) {
      return fmt::format("{}: '{}': line {}", field, path, number);
    };
    try {
      for (DocumentReader::Piece piece; reader.next(piece);) {
        if (piece.begins) line.clear();
        line += piece.bytes;
        if (piece.ends && !is_blank(line)) add(line, place(piece.line));
      }
    } catch (const CompressionError& error) {
      fail<FileError>("{}: {}", place(reader.line()), error.problem());
    }
  }

 private:
  void add(std::string_view line, const std::string& place) {
    EncodedConversation all = encoder_.encode(parse_conversation(line, place));
    const size_t most = static_cast<size_t>(limits_.seq_length);
    const bool cut = all.ids.size() > most;
    if (cut) {
      all.ids.resize(most);
      all.learned.resize(most);
    }
    if (!all.learned.empty()) all.learned[0] = false;
    if (std::find(all.learned.begin(), all.learned.end(), true) == all.learned.end()) {
      ++set_.empty_;
      return;
    }
    const int64_t largest = *std::max_element(all.ids.begin(), all.ids.end());
    require<FileError>(largest < limits_.vocabulary_size,
                       "{}: token id: found {}, allowed: less than {} (model.vocab_size)", place,
                       largest, limits_.vocabulary_size);
    set_.cut_ += cut ? 1 : 0;
    set_.ids_.insert(set_.ids_.end(), all.ids.begin(), all.ids.end());
    set_.learned_.insert(set_.learned_.end(), all.learned.begin(), all.learned.end());
    set_.begins_.push_back(static_cast<int64_t>(set_.ids_.size()));
  }

  ConversationSet& set_;
  ConversationEncoder& encoder_;
  const Limits& limits_;
};

ConversationSet::ConversationSet(const std::vector<std::string>& paths, const std::string& field,
                                 const DataConfig& config, const Limits& limits) {
  require<ConfigError>(!paths.empty(),
                       "{}: is not set, allowed with train.task = sft: files of JSON lines with "
                       "conversations",
                       field);
  for (const std::string& path : paths)
    require<ConfigError>(form_of_input(path) == InputForm::json_lines,
                         "{}: found '{}', allowed with train.task = sft: files that end in .jsonl, "
                         ".jsonl.gz or .jsonl.zst",
                         field, path);
  const std::unique_ptr<Tokenizer> tokenizer = make_tokenizer(config.tokenizer, "data.tokenizer");
  ConversationEncoder encoder(chat_form(config.chat_template), *tokenizer, config.tokenizer);
  Reader reader(*this, encoder, limits);
  for (const std::string& path : paths) {
    const int64_t first = size();
    reader.read(path, field);
    files_.push_back({first, size()});
  }
  ids_.shrink_to_fit();
  learned_.shrink_to_fit();
}

std::span<const uint32_t> ConversationSet::ids(int64_t conversation) const {
  return std::span(ids_).subspan(static_cast<size_t>(begins_[static_cast<size_t>(conversation)]),
                                 static_cast<size_t>(length(conversation)));
}

std::span<const uint8_t> ConversationSet::learned(int64_t conversation) const {
  return std::span(learned_).subspan(
      static_cast<size_t>(begins_[static_cast<size_t>(conversation)]),
      static_cast<size_t>(length(conversation)));
}

int64_t ConversationSet::num_learned(const ConversationRange& range) const {
  const auto begin = learned_.begin() + begins_[static_cast<size_t>(range.first)];
  return std::count(begin, begin + num_tokens(range), uint8_t{1});
}

}  // namespace lockstep
