// Stands for a library of NVIDIA that is loaded when the program runs. FAKE_MAJOR: its version.
extern "C" [[gnu::visibility("default")]] int fake_library_major() {
  return FAKE_MAJOR;
}
