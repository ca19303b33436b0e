// An MPI module of another version of the program, whose table cannot be used.
extern "C" {

[[gnu::visibility("default")]] const char* ballast_mpi_version() {
  return "0.0.0 (interface 0)";
}
[[gnu::visibility("default")]] const void* ballast_mpi_table() {
  return nullptr;
}

}  // extern "C"
