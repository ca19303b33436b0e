#pragma once

namespace ballast::tools {

/// Makes the first SIGINT, SIGTERM or SIGHUP print at once, on standard error, how the work ends:
/// "ballast: SIGTERM: the run ends after this step; a second signal after 2 seconds ends it at
/// once". `ending` must live as long as the program; nullptr prints nothing. A view that fills the
/// terminal (set_line_taker()) shows this itself.
void announce_ending(const char* ending);

}  // namespace ballast::tools
