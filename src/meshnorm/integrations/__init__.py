"""One file for each project that meshnorm plugs into, which it imports; nothing here is imported by the rest."""
