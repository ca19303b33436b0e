// Replaces a library of NVIDIA that is loaded at run time. FAKE_MAJOR is its version.
extern "C" [[gnu::visibility("default")]] int fake_library_major() {
  return FAKE_MAJOR;
}
