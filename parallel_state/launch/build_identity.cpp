#include "lockstep/parallel_state/build_identity.h"

#include <elf.h>
#include <link.h>

#include <cstdint>
#include <cstring>
#include <set>
#include <string_view>

#include "lockstep/core/check.h"
#include "lockstep/core/text_digest.h"

namespace lockstep {
namespace {

size_t aligned(size_t size) { return (size + 3) & ~size_t{3}; }

/// The GNU build id in a segment of notes; empty if there is none.
std::string_view build_id_in(const char* at, const char* end) {
  ElfW(Nhdr) note;
  while (static_cast<size_t>(end - at) >= sizeof note) {
    std::memcpy(&note, at, sizeof note);
    const char* const name = at + sizeof note;
    const char* const content = name + aligned(note.n_namesz);
    if (content > end || note.n_descsz > static_cast<size_t>(end - content)) break;
    if (note.n_type == NT_GNU_BUILD_ID && std::string_view(name, note.n_namesz) ==
                                              std::string_view(ELF_NOTE_GNU, sizeof ELF_NOTE_GNU))
      return {content, note.n_descsz};
    at = content + aligned(note.n_descsz);
  }
  return {};
}

bool is_ours(std::string_view path) {
  const std::string_view file = path.substr(path.rfind('/') + 1);
  return path.empty() || file.starts_with("liblockstep") || file.starts_with("libtorch_c");
}

int collect(dl_phdr_info* info, size_t, void* ids) {
  if (!is_ours(info->dlpi_name ? info->dlpi_name : "")) return 0;
  for (int i = 0; i < info->dlpi_phnum; ++i) {
    const ElfW(Phdr)& segment = info->dlpi_phdr[i];
    if (segment.p_type != PT_NOTE) continue;
    const auto* const begin = reinterpret_cast<const char*>(info->dlpi_addr + segment.p_vaddr);
    const std::string_view id = build_id_in(begin, begin + segment.p_memsz);
    if (!id.empty()) static_cast<std::set<std::string>*>(ids)->emplace(id);
  }
  return 0;
}

}  // namespace

std::string build_identity() {
  std::set<std::string> ids;
  ::dl_iterate_phdr(collect, &ids);
  uint64_t digest = text_digest("");
  for (const std::string& id : ids) digest = text_digest(id, digest);
  return fmt::format("{} ({:016x})", LOCKSTEP_VERSION, digest);
}

}  // namespace lockstep
