#include "lockstep/checkpoint/manifest.h"

#include <google/protobuf/io/tokenizer.h>
#include <google/protobuf/text_format.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <set>
#include <tuple>

#include "lockstep/checkpoint/manifest_progress.h"
#include "lockstep/checkpoint/safetensors_header.h"
#include "lockstep/core/check.h"
#include "lockstep/core/integers.h"
#include "lockstep/datasets/crc32.h"
#include "lockstep/parallel_state/parallel_axes.h"

#include "checkpoint/manifest.pb.h"

namespace lockstep {
namespace {

namespace pb = google::protobuf;

constexpr int64_t kFormatVersion = 1;
constexpr size_t kLongestText = size_t{1} << 30;
constexpr std::string_view kChecksumPrefix = "# crc32 ";
constexpr size_t kChecksumLine = 8 + 8 + 1;  // prefix, hexadecimal digits, newline

class FirstError : public pb::io::ErrorCollector {
 public:
  void AddError(int line, pb::io::ColumnNumber column, const std::string& message) override {
    if (text_.empty()) text_ = fmt::format("line {}, column {}: {}", line + 1, column + 1, message);
  }
  const std::string& text() const { return text_; }

 private:
  std::string text_;
};

std::vector<int64_t> vector_of(const pb::RepeatedField<int64_t>& values) {
  return {values.begin(), values.end()};
}

void assign(pb::RepeatedField<int64_t>* field, const std::vector<int64_t>& values) {
  field->Assign(values.begin(), values.end());
}

bool is_plain_name(const std::string& name) {
  const auto allowed = [](char c) {
    return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') || c == '_' ||
           c == '-' || c == '.';
  };
  return !name.empty() && name.size() < 200 && name.front() != '.' &&
         std::all_of(name.begin(), name.end(), allowed);
}

/// The field of CheckpointLayout that holds `size`.
const pb::FieldDescriptor* field_of(const ParallelSize& size) {
  const std::string name = size.name_with('_');
  const auto* const field = proto::CheckpointLayout::descriptor()->FindFieldByName(name);
  require<UsageError>(field != nullptr, "CheckpointLayout of manifest.proto: lacks the field {}",
                      name);
  return field;
}

/// Leaves out sizes that equal the default of their field, so that older versions can read it.
void write_layout(const ManifestLayout& from, proto::CheckpointLayout* to) {
  to->set_world_size(from.world_size);
  for (const ParallelSize* size : parallel_size_table()) {
    const pb::FieldDescriptor* const field = field_of(*size);
    const int64_t ranks = size->of(from);
    if (!field->has_default_value() || field->default_value_int64() != ranks)
      to->GetReflection()->SetInt64(to, field, ranks);
  }
  to->set_order(from.order);
  to->set_distributed_optimizer(from.distributed_optimizer);
  to->set_optimizer_instances(from.optimizer_instances);
}

/// Reads and checks the parts of a manifest; every message names `path_`.
class Reader {
 public:
  Reader(const std::string& path, bool whole) : path_(path), whole_(whole) {}

  ManifestLayout layout(const proto::CheckpointLayout& from) const {
    ManifestLayout layout;
    layout.world_size = at_least_one(from.world_size());
    for (const ParallelSize* size : parallel_size_table())
      size->set(layout, at_least_one(from.GetReflection()->GetInt64(from, field_of(*size))));
    layout.order = from.order();
    layout.distributed_optimizer = from.distributed_optimizer();
    layout.optimizer_instances = at_least_one(from.optimizer_instances());
    return layout;
  }

  ManifestScaler scaler(const proto::CheckpointScaler& from) const {
    check(std::isfinite(from.scale()) && from.scale() > 0, "scaler: found {}, allowed: > 0",
          from.scale());
    return {from.scale(), from.growth_tracker(), from.hysteresis_tracker()};
  }

  ManifestFile file(const proto::CheckpointFile& from, std::set<std::string>* names) const {
    check(is_plain_name(from.name()),
          "file '{}': allowed: a plain name in the folder (letters, digits, _ - .)", from.name());
    check(names->insert(from.name()).second, "file '{}' is listed twice", from.name());
    check(from.size() >= 0, "file '{}': size: found {}, allowed: >= 0", from.name(), from.size());
    check(from.block_crc32_size() == ceil_div(from.size(), kChecksumBlock),
          "file '{}': {} checksums for {} bytes, allowed: one for each {} bytes", from.name(),
          from.block_crc32_size(), from.size(), kChecksumBlock);
    return {from.name(), from.size(), {from.block_crc32().begin(), from.block_crc32().end()}};
  }

  ManifestTensor tensor(const proto::CheckpointTensor& from, const Manifest& manifest) const {
    ManifestTensor tensor{from.name(), from.state(), from.dtype(), vector_of(from.shape()), {}};
    check(!tensor.name.empty(), "a tensor has no name");
    const std::string key = tensor.key();
    int64_t bytes = 0;
    try {
      bytes = safetensors_element_size(tensor.dtype);
    } catch (const ConfigError&) {
      fail<FileError>("'{}': tensor '{}': unknown dtype '{}'", path_, key, tensor.dtype);
    }
    const int64_t element = bytes;
    for (const int64_t length : tensor.shape) {
      check(length >= 0, "tensor '{}': shape: found {}, allowed: >= 0", key, length);
      check(!__builtin_mul_overflow(bytes, std::max<int64_t>(length, 1), &bytes),
            "tensor '{}': its size does not fit into 64 bits", key);
    }
    std::vector<TensorPart> parts;
    for (const proto::CheckpointPiece& piece : from.piece()) {
      tensor.pieces.push_back(this->piece(piece, tensor, element, manifest));
      parts.push_back(tensor.pieces.back().part);
    }
    const std::string wrong = whole_ ? tiling_error(tensor.shape, parts) : "";
    check(wrong.empty(), "tensor '{}': {}", key, wrong);
    return tensor;
  }

  template <class... Args>
  void check(bool condition, fmt::format_string<Args...> message, Args&&... args) const {
    if (!condition) [[unlikely]]
      fail<FileError>("'{}': {}", path_, fmt::format(message, std::forward<Args>(args)...));
  }

 private:
  int64_t at_least_one(int64_t size) const {
    check(size >= 1, "layout: found {}, allowed: >= 1", size);
    return size;
  }

  ManifestPiece piece(const proto::CheckpointPiece& from, const ManifestTensor& tensor,
                      int64_t element, const Manifest& manifest) const {
    const std::string key = tensor.key();
    ManifestPiece piece{from.file(),
                        from.offset(),
                        {{tensor.shape, vector_of(from.start()), vector_of(from.size())},
                         {from.first(), from.last()}}};
    const TensorBox& box = piece.part.box;
    check(box.start.size() == box.shape.size() && box.size.size() == box.shape.size(),
          "tensor '{}': a piece of {} dimensions, allowed: {}", key, box.start.size(),
          box.shape.size());
    for (size_t d = 0; d < box.shape.size(); ++d)
      check(box.start[d] >= 0 && box.size[d] >= 0 && box.size[d] <= box.shape[d] &&
                box.start[d] <= box.shape[d] - box.size[d],
            "tensor '{}': a piece of {} elements from {} in dimension {}, allowed: inside {}", key,
            box.size[d], box.start[d], d, box.shape[d]);
    const FlatRange& range = piece.part.range;
    check(range.first >= 0 && range.first <= range.last && range.last <= box.numel(),
          "tensor '{}': a piece of elements {} to {}, allowed: inside {}", key, range.first,
          range.last, box.numel());
    check(piece.file >= 0 && piece.file < static_cast<int64_t>(manifest.files.size()),
          "tensor '{}': file number {}, allowed: below {}", key, piece.file, manifest.files.size());
    const ManifestFile& file = manifest.files[static_cast<size_t>(piece.file)];
    check(piece.offset >= 0 && piece.offset <= file.size &&
              range.numel() * element <= file.size - piece.offset,
          "tensor '{}': {} bytes from byte {} of '{}', which has {}", key, range.numel() * element,
          piece.offset, file.name, file.size);
    return piece;
  }

  const std::string& path_;
  bool whole_;  ///< every element of every tensor must be there
};

/// Checks that the pieces of a file do not overlap.
void check_overlaps(const Manifest& manifest, const Reader& reader) {
  struct Extent {
    int64_t file, begin, end;
    const ManifestTensor* tensor;
  };
  std::vector<Extent> extents;
  for (const ManifestTensor& tensor : manifest.tensors)
    for (const ManifestPiece& piece : tensor.pieces)
      extents.push_back(
          {piece.file, piece.offset,
           piece.offset + piece.part.range.numel() * safetensors_element_size(tensor.dtype),
           &tensor});
  std::sort(extents.begin(), extents.end(), [](const Extent& a, const Extent& b) {
    return std::tie(a.file, a.begin, a.end) < std::tie(b.file, b.begin, b.end);
  });
  for (size_t i = 1; i < extents.size(); ++i) {
    const Extent &before = extents[i - 1], &extent = extents[i];
    reader.check(before.file != extent.file || before.end <= extent.begin,
                 "tensors '{}' and '{}' overlap at byte {} of '{}'", before.tensor->key(),
                 extent.tensor->key(), extent.begin,
                 manifest.files[static_cast<size_t>(extent.file)].name);
  }
}

Manifest read(const proto::CheckpointManifest& from, const Reader& reader) {
  reader.check(from.format_version() == kFormatVersion,
               "format_version: found {}, allowed: {}; was it saved by a newer version?",
               from.format_version(), kFormatVersion);
  reader.check(from.block_bytes() == kChecksumBlock, "block_bytes: found {}, allowed: {}",
               from.block_bytes(), kChecksumBlock);
  Manifest manifest;
  read_progress(from, reader, manifest);
  if (from.has_metrics_crc32()) manifest.metrics_checksum = from.metrics_crc32();
  manifest.layout = reader.layout(from.layout());
  if (from.has_scaler()) manifest.scaler = reader.scaler(from.scaler());
  manifest.job_id = from.job_id();
  std::set<std::string> names;
  for (const auto& file : from.file()) manifest.files.push_back(reader.file(file, &names));
  std::set<std::string> keys;
  for (const auto& tensor : from.tensor()) {
    manifest.tensors.push_back(reader.tensor(tensor, manifest));
    const std::string key = manifest.tensors.back().key();
    reader.check(keys.insert(key).second, "tensor '{}' is listed twice", key);
  }
  check_overlaps(manifest, reader);
  return manifest;
}

proto::CheckpointManifest to_message(const Manifest& manifest) {
  proto::CheckpointManifest message;
  message.set_format_version(kFormatVersion);
  write_progress(manifest, message);
  if (manifest.metrics_checksum) message.set_metrics_crc32(*manifest.metrics_checksum);
  if (manifest.scaler) {
    message.mutable_scaler()->set_scale(manifest.scaler->scale);
    message.mutable_scaler()->set_growth_tracker(manifest.scaler->growth_tracker);
    message.mutable_scaler()->set_hysteresis_tracker(manifest.scaler->hysteresis_tracker);
  }
  if (!manifest.job_id.empty()) message.set_job_id(manifest.job_id);
  write_layout(manifest.layout, message.mutable_layout());
  message.set_block_bytes(kChecksumBlock);
  for (const ManifestFile& from : manifest.files) {
    proto::CheckpointFile& file = *message.add_file();
    file.set_name(from.name);
    file.set_size(from.size);
    file.mutable_block_crc32()->Assign(from.block_crc32.begin(), from.block_crc32.end());
  }
  for (const ManifestTensor& from : manifest.tensors) {
    proto::CheckpointTensor& tensor = *message.add_tensor();
    tensor.set_name(from.name);
    if (!from.state.empty()) tensor.set_state(from.state);
    tensor.set_dtype(from.dtype);
    assign(tensor.mutable_shape(), from.shape);
    for (const ManifestPiece& part : from.pieces) {
      proto::CheckpointPiece& piece = *tensor.add_piece();
      piece.set_file(part.file);
      piece.set_offset(part.offset);
      assign(piece.mutable_start(), part.part.box.start);
      assign(piece.mutable_size(), part.part.box.size);
      piece.set_first(part.part.range.first);
      piece.set_last(part.part.range.last);
    }
  }
  return message;
}

std::string checksum_line(std::string_view body) {
  return fmt::format("{}{:08x}\n", kChecksumPrefix, crc32(body));
}

void check_checksum(std::string_view text, const std::string& path) {
  if (text.size() < kChecksumLine) return;  // parse_message() reports it
  const std::string_view body = text.substr(0, text.size() - kChecksumLine);
  const std::string expected = checksum_line(body);
  require<FileError>(text.substr(body.size()) == expected,
                     "'{}': bytes 0 to {} have the checksum '{}', but the last line says '{}'",
                     path, body.size(), expected.substr(0, expected.size() - 1),
                     text.substr(body.size(), kChecksumLine - 1));
}

proto::CheckpointManifest parse_message(std::string_view text, const Reader& reader) {
  reader.check(text.size() <= kLongestText, "{} bytes, allowed: up to {}", text.size(),
               kLongestText);
  reader.check(text.size() >= kChecksumLine &&
                   text.substr(text.size() - kChecksumLine).starts_with(kChecksumPrefix),
               "the last line, byte {} on, is not a checksum; is the file truncated?",
               text.size() - std::min(text.size(), kChecksumLine));
  const std::string body(text.substr(0, text.size() - kChecksumLine));
  proto::CheckpointManifest message;
  FirstError errors;
  pb::TextFormat::Parser parser;
  parser.RecordErrorsTo(&errors);
  parser.SetRecursionLimit(8);
  const bool good = parser.ParseFromString(body, &message);
  reader.check(good, "{}", errors.text().empty() ? std::string("no manifest") : errors.text());
  return message;
}

}  // namespace

std::string tensor_key(std::string_view name, std::string_view state) {
  return state.empty() ? std::string(name) : fmt::format("optimizer.{}.{}", state, name);
}

bool ManifestLayout::operator==(const ManifestLayout& other) const {
  const auto sizes = parallel_size_table();
  return std::all_of(
             sizes.begin(), sizes.end(),
             [&](const ParallelSize* size) { return size->of(*this) == size->of(other); }) &&
         std::tie(world_size, order, distributed_optimizer, optimizer_instances) ==
             std::tie(other.world_size, other.order, other.distributed_optimizer,
                      other.optimizer_instances);
}

std::string ManifestTensor::key() const { return tensor_key(name, state); }

int64_t ManifestTensor::numel() const {
  int64_t count = 1;
  for (const int64_t length : shape) count *= length;
  return count;
}

const ManifestTensor* Manifest::find(std::string_view name, std::string_view state) const {
  for (const ManifestTensor& tensor : tensors)
    if (tensor.name == name && tensor.state == state) return &tensor;
  return nullptr;
}

std::string format_manifest(const Manifest& manifest) {
  pb::TextFormat::Printer printer;
  printer.SetUseShortRepeatedPrimitives(true);
  std::string body;
  require<UsageError>(printer.PrintToString(to_message(manifest), &body),
                      "the manifest of a checkpoint cannot be formatted");
  return body + checksum_line(body);
}

Manifest parse_manifest_body(std::string_view text, const std::string& path) {
  return read(parse_message(text, Reader(path, /*whole=*/true)), Reader(path, /*whole=*/true));
}

Manifest parse_manifest_part(std::string_view text, const std::string& path) {
  check_checksum(text, path);
  const Reader reader(path, /*whole=*/false);
  return read(parse_message(text, reader), reader);
}

Manifest parse_manifest(std::string_view text, const std::string& path) {
  check_checksum(text, path);
  return parse_manifest_body(text, path);
}

Manifest join_manifests(Manifest whole, const std::vector<Manifest>& parts) {
  std::map<std::string, size_t> places;
  for (const Manifest& part : parts) {
    const auto files = static_cast<int64_t>(whole.files.size());
    whole.files.insert(whole.files.end(), part.files.begin(), part.files.end());
    for (const ManifestTensor& tensor : part.tensors) {
      const auto [place, is_new] = places.emplace(tensor.key(), whole.tensors.size());
      if (is_new)
        whole.tensors.push_back({tensor.name, tensor.state, tensor.dtype, tensor.shape, {}});
      ManifestTensor& into = whole.tensors[place->second];
      require<UsageError>(into.dtype == tensor.dtype && into.shape == tensor.shape,
                          "tensor '{}': one rank has {} [{}], another {} [{}]", tensor.key(),
                          into.dtype, fmt::join(into.shape, ", "), tensor.dtype,
                          fmt::join(tensor.shape, ", "));
      for (ManifestPiece piece : tensor.pieces) {
        piece.file += files;
        into.pieces.push_back(std::move(piece));
      }
    }
  }
  return whole;
}

}  // namespace lockstep
