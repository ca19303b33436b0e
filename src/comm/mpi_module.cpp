// The MPI module, a separate library that the program loads. See mpi_loading.h.
#include <algorithm>
#include <array>
#include <cstring>
#include <new>
#include <string_view>

#include <mpi.h>

#include "src/comm/mpi_loading.h"

namespace ballast::comm {
namespace {

static_assert(sizeof(MPI_Comm) <= sizeof(MpiHandle) && sizeof(MPI_Request) <= sizeof(MpiHandle));

MPI_Comm& comm(MpiHandle* handle) {
  return *std::launder(reinterpret_cast<MPI_Comm*>(handle->memory));
}
MPI_Comm comm(const MpiHandle* handle) {
  return *std::launder(reinterpret_cast<const MPI_Comm*>(handle->memory));
}
MPI_Request* request_of(MpiHandle* handle) {
  return std::launder(reinterpret_cast<MPI_Request*>(handle->memory));
}
/// Memory for a result of MPI, which MPI does not read.
template <class T>
T* fresh(MpiHandle* handle, T value) {
  return new (handle->memory) T(value);
}
MPI_Request* fresh_request(MpiHandle* handle) {
  return fresh<MPI_Request>(handle, MPI_REQUEST_NULL);
}

/// The type of kPage bytes as one element.
MPI_Datatype& page() {
  static MPI_Datatype type = MPI_DATATYPE_NULL;
  return type;
}
MPI_Datatype type_of(MpiUnit unit) {
  return unit == MpiUnit::page ? page() : MPI_BYTE;
}

int started(int* yes) {
  return MPI_Initialized(yes);
}
int start(int* threads) {
  int granted = MPI_THREAD_SINGLE;
  *threads = 0;
  if (const int code = MPI_Init_thread(nullptr, nullptr, MPI_THREAD_MULTIPLE, &granted))
    return code;
  *threads = granted >= MPI_THREAD_MULTIPLE ? 1 : 0;
  if (const int code = MPI_Comm_set_errhandler(MPI_COMM_WORLD, MPI_ERRORS_RETURN)) return code;
  if (const int code = MPI_Type_contiguous(static_cast<int>(kPage), MPI_BYTE, &page())) return code;
  return MPI_Type_commit(&page());
}
int finish() {
  MPI_Type_free(&page());
  return MPI_Finalize();
}
void end_all(int status) {
  MPI_Abort(MPI_COMM_WORLD, status);
}

int place(int* rank, int* world) {
  if (const int code = MPI_Comm_rank(MPI_COMM_WORLD, rank)) return code;
  return MPI_Comm_size(MPI_COMM_WORLD, world);
}

void copy_text(std::string_view from, char* to, std::size_t size) {
  const std::size_t length = std::min(from.size(), size - 1);
  std::memcpy(to, from.data(), length);
  to[length] = '\0';
}
void describe_error(int code, char* text, std::size_t size) {
  std::array<char, MPI_MAX_ERROR_STRING> all = {};
  int length = 0;
  MPI_Error_string(code, all.data(), &length);
  copy_text({all.data(), static_cast<std::size_t>(length)}, text, size);
}
void describe_library(char* text, std::size_t size) {
  std::array<char, MPI_MAX_LIBRARY_VERSION_STRING> all = {};
  int length = 0;
  MPI_Get_library_version(all.data(), &length);
  copy_text({all.data(), static_cast<std::size_t>(length)}, text, size);
}

int duplicate_world(MpiHandle* made, MpiHandle* request) {
  return MPI_Comm_idup(MPI_COMM_WORLD, fresh<MPI_Comm>(made, MPI_COMM_NULL),
                       fresh_request(request));
}
int split_world(int color, int key, MpiHandle* made) {
  return MPI_Comm_split(MPI_COMM_WORLD, color, key, fresh<MPI_Comm>(made, MPI_COMM_NULL));
}
int release(MpiHandle* communicator) {
  return MPI_Comm_free(&comm(communicator));
}
int world_barrier(MpiHandle* request) {
  return MPI_Ibarrier(MPI_COMM_WORLD, fresh_request(request));
}
int test(MpiHandle* request, int* done) {
  return MPI_Test(request_of(request), done, MPI_STATUS_IGNORE);
}

int barrier(const MpiHandle* communicator, MpiHandle* request) {
  return MPI_Ibarrier(comm(communicator), fresh_request(request));
}
int all_gather(const MpiHandle* communicator, const void* from, void* to, int count, MpiUnit unit,
               MpiHandle* request) {
  return MPI_Iallgather(from == nullptr ? MPI_IN_PLACE : from, count, type_of(unit), to, count,
                        type_of(unit), comm(communicator), fresh_request(request));
}
int all_gather_parts(const MpiHandle* communicator, void* whole, const int* counts,
                     const int* places, MpiHandle* request) {
  return MPI_Iallgatherv(MPI_IN_PLACE, 0, page(), whole, counts, places, page(), comm(communicator),
                         fresh_request(request));
}
int exchange(const MpiHandle* communicator, const void* sent, const int* sent_counts,
             const int* sent_places, void* received, const int* received_counts,
             const int* received_places, MpiHandle* request) {
  return MPI_Ialltoallv(sent, sent_counts, sent_places, page(), received, received_counts,
                        received_places, page(), comm(communicator), fresh_request(request));
}
int send(const MpiHandle* communicator, const void* data, int bytes, int to, MpiHandle* request) {
  return MPI_Isend(data, bytes, MPI_BYTE, to, 0, comm(communicator), fresh_request(request));
}
int receive(const MpiHandle* communicator, void* data, int bytes, int from, MpiHandle* request) {
  return MPI_Irecv(data, bytes, MPI_BYTE, from, 0, comm(communicator), fresh_request(request));
}
int broadcast(const MpiHandle* communicator, void* data, int count, MpiUnit unit, int root,
              MpiHandle* request) {
  return MPI_Ibcast(data, count, type_of(unit), root, comm(communicator), fresh_request(request));
}

}  // namespace
}  // namespace ballast::comm

extern "C" {

[[gnu::visibility("default")]] const char* ballast_mpi_version() {
  return BALLAST_VERSION " (interface " BALLAST_MPI_INTERFACE ")";
}

[[gnu::visibility("default")]] const ballast::comm::MpiTable* ballast_mpi_table() {
  using namespace ballast::comm;
  static const MpiTable table = {.started = started,
                                 .start = start,
                                 .finish = finish,
                                 .abort = end_all,
                                 .place = place,
                                 .describe_error = describe_error,
                                 .describe_library = describe_library,
                                 .duplicate_world = duplicate_world,
                                 .split_world = split_world,
                                 .release = release,
                                 .world_barrier = world_barrier,
                                 .test = test,
                                 .barrier = barrier,
                                 .all_gather = all_gather,
                                 .all_gather_parts = all_gather_parts,
                                 .exchange = exchange,
                                 .send = send,
                                 .receive = receive,
                                 .broadcast = broadcast};
  return &table;
}

}  // extern "C"
