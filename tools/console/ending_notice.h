#pragma once

namespace ballast::tools {

/// Makes the first SIGINT or SIGTERM say at once, on standard error, how the work ends: "ballast:
/// SIGTERM: the run ends after this step; a second signal ends it at once". `ending` is a string
/// that lives as long as the program; nullptr says nothing. A view that fills the terminal
/// (set_line_taker()) says it in its own way.
void announce_ending(const char* ending);

}  // namespace ballast::tools
