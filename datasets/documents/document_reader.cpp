#include "lockstep/datasets/document_reader.h"

#include <cstring>
#include <utility>

namespace lockstep {
namespace {

constexpr size_t kPieceBytes = 1 << 20;
constexpr std::string_view kByteOrderMark = "\xEF\xBB\xBF";

}  // namespace

InputForm form_of_input(std::string_view path) {
  return without_compression(path).ends_with(".jsonl") ? InputForm::json_lines : InputForm::text;
}

bool is_named_json(std::string_view path) { return without_compression(path).ends_with(".json"); }

DocumentReader::DocumentReader(const std::string& path)
    : DocumentReader(
          std::make_unique<InputFile>(path, InputOptions{.kinds = InputKinds::regular_or_pipe}),
          path, nullptr) {}

DocumentReader::DocumentReader(std::string path, CompressedInput::Source source)
    : DocumentReader(nullptr, std::move(path), std::move(source)) {}

DocumentReader::DocumentReader(std::unique_ptr<InputFile> file, std::string path,
                               CompressedInput::Source source)
    : file_(std::move(file)),
      form_(form_of_input(path)),
      input_(
          compression_of(path),
          [this, source = std::move(source)](char* to, size_t count) {
            const size_t got = file_ ? file_->read(to, count) : source(to, count);
            bytes_read_ += static_cast<int64_t>(got);
            return got;
          },
          path),
      buffer_(std::make_unique_for_overwrite<char[]>(kPieceBytes)) {}

bool DocumentReader::refill() {
  if (end_ == kPieceBytes) {
    std::memmove(buffer_.get(), buffer_.get() + begin_, end_ - begin_);
    end_ -= begin_;
    searched_ -= begin_;
    begin_ = 0;
  }
  const size_t got = input_.read(buffer_.get() + end_, kPieceBytes - end_);
  end_ += got;
  return got > 0;
}

void DocumentReader::skip_byte_order_mark() {
  at_start_ = false;
  while (end_ < kByteOrderMark.size() && refill()) continue;
  const bool marked = std::string_view(buffer_.get(), end_).starts_with(kByteOrderMark);
  if (form_ == InputForm::json_lines && marked) begin_ = searched_ = kByteOrderMark.size();
}

bool DocumentReader::next(Piece& piece) {
  if (ended_) return false;
  if (at_start_) skip_byte_order_mark();
  const auto hand_out = [&](size_t end, bool ends) {
    piece = {.bytes = {buffer_.get() + begin_, end - begin_},
             .begins = !inside_,
             .ends = ends,
             .line = line_};
    inside_ = !ends;
    begin_ = searched_ = end;
    return true;
  };
  for (;;) {
    const std::string_view read(buffer_.get(), end_);
    const size_t feed =
        form_ == InputForm::json_lines ? read.find('\n', searched_) : std::string_view::npos;
    if (feed != std::string_view::npos) {
      hand_out(feed, /*ends=*/true);
      begin_ = searched_ = feed + 1;
      ++line_;
      return true;
    }
    searched_ = end_;
    if (begin_ == 0 && end_ == kPieceBytes) return hand_out(end_, /*ends=*/false);
    if (refill()) continue;
    ended_ = true;
    const bool another = form_ == InputForm::text || inside_ || begin_ < end_;
    return another && hand_out(end_, /*ends=*/true);
  }
}

}  // namespace lockstep
