#include "ballast/plan/hiding.h"

#include "ballast/core/error.h"

namespace ballast::plan {

double tokens_to_hide(double bytes_per_parameter, double flops_per_second,
                      double bytes_per_second) {
  expects(bytes_per_parameter > 0.0 && flops_per_second > 0.0 && bytes_per_second > 0.0,
          "tokens_to_hide: bytes, FLOP/s and bandwidth must be above 0");
  return bytes_per_parameter / kFlopsPerParameterAndToken * flops_per_second / bytes_per_second;
}

}  // namespace ballast::plan
