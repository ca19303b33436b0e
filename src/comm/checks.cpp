#include "src/comm/checks.h"

#include "ballast/core/error.h"

namespace ballast::comm {
namespace {

void check_pages(Bytes bytes) {
  expects(bytes % kPage == 0, "a collective was given a buffer of no whole number of pages");
}

void check_sum(DType type, DeviceBytes scratch, std::uint32_t world) {
  expects(type == DType::f32 || type == DType::bf16, "sums over ranks are of f32 or bf16");
  expects(scratch.size() >= world * kPage, "a sum over ranks needs a page of scratch per rank");
}

}  // namespace

void check_all_gather(ConstDeviceBytes part, DeviceBytes whole, std::uint32_t world) {
  check_pages(part.size());
  expects(whole.size() == world * part.size(), "all_gather: the whole is not one part per rank");
}

void check_reduce_scatter(DeviceBytes whole, DeviceBytes part, DType type, DeviceBytes scratch,
                          std::uint32_t world) {
  check_pages(part.size());
  expects(whole.size() == world * part.size(), "reduce_scatter: the whole is not a part per rank");
  check_sum(type, scratch, world);
}

void check_all_reduce(DeviceBytes whole, DType type, DeviceBytes scratch, std::uint32_t world) {
  check_pages(whole.size());
  check_sum(type, scratch, world);
}

void check_broadcast(DeviceBytes data, std::uint32_t root, std::uint32_t world) {
  check_pages(data.size());
  expects(root < world, "broadcast: there is no such rank");
}

}  // namespace ballast::comm
