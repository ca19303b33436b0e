// io_load DIRECTORY BACKEND OPERATIONS DEPTH writes and reads this number of pages through a queue
// that is always full. Exits 77 if the backend or direct I/O is missing.
#include <cstdio>
#include <cstdlib>
#include <vector>

#include "ballast/aio/queue.h"
#include "ballast/core/error.h"

#include "tests/support/aligned_bytes.h"
#include "tests/support/direct_io.h"

namespace ballast::aio {
namespace {

void load(const char* directory, const QueueOptions& options, std::size_t operations) {
  const File file = File::create_anonymous(directory, operations * kPage);
  const test::AlignedBytes memory(operations * kPage);
  const auto queue = make_queue(options, {{&file}, {memory.view()}});
  for (const Direction direction : {Direction::write, Direction::read}) {
    std::vector<Request> requests;
    for (std::size_t i = 0; i < operations; ++i) {
      requests.push_back({direction, &file, i * kPage, memory.view(i * kPage, kPage)});
    }
    for (const Ticket ticket : queue->submit(std::span<Request>(requests))) {
      queue->wait(ticket).check("load");
    }
  }
}

}  // namespace
}  // namespace ballast::aio

int main(int argc, char** argv) {
  using namespace ballast::aio;
  if (argc != 5) return 2;
  const QueueOptions options{.backend = argv[2],
                             .depth = static_cast<unsigned>(std::strtoul(argv[4], nullptr, 10))};
  for (const Backend& backend : probe_backends()) {
    if (backend.name == options.backend && !backend.usable) {
      std::puts(backend.reason.c_str());
      return 77;
    }
  }
  if (!ballast::test::has_direct_io(argv[1])) {
    std::puts("no direct I/O in the directory for temporary files");
    return 77;
  }
  try {
    load(argv[1], options, std::strtoul(argv[3], nullptr, 10));
  } catch (const ballast::Error& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
  }
  return 0;
}
