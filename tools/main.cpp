#include "tools/program.h"

int main(int argc, char** argv) {
  return ballast::tools::main_program(argc, argv);
}
