#include "lockstep/planner/ring_bytes.h"

namespace lockstep {

int64_t ring_bytes(CollectiveOperation::Kind kind, int64_t bytes, int64_t size) {
  using Kind = CollectiveOperation::Kind;
  switch (kind) {
    case Kind::all_reduce:
      return 2 * (size - 1) * bytes / size;
    case Kind::reduce_scatter:
    case Kind::reduce_scatter_to_group:
    case Kind::all_to_all:
    case Kind::all_to_all_rows:
    case Kind::all_to_all_dims:
      return (size - 1) * bytes / size;
    case Kind::all_gather:
    case Kind::gather_from_group:
      return (size - 1) * bytes;
    case Kind::broadcast:
    case Kind::send:
    case Kind::exchange:
      return bytes;
    case Kind::receive:
    case Kind::scatter_to_group:
    case Kind::comparison:
      return 0;
  }
  return 0;
}

}  // namespace lockstep
