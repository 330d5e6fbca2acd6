"""Code that all streams of media files share. Open `section` first; it imports only `errors`."""
