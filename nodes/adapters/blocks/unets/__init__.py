"""The blocks of UNets and of ControlNets: for pictures, and for videos."""
